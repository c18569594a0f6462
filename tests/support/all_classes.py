"""Every causal language model class of transformers: compiled and equal, or refused for a feature that is named.

`python tests/support/all_classes.py [TYPE …]` tries them (all, or those) and writes what it finds to all_classes.json,
which docs/models.md is made of and the slow test of all classes compares with.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odd_models import LENGTH, OnlyConfigError, make_odd_model

RESULTS = Path(__file__).with_suffix(".json")
NEW_TOKENS = 8
LENGTHS = (37, 13, 1)
TOLERANCE = 1e-4  # of float32 logits, by the largest of them
EQUAL = "equal"
# Features by what a refusal says of them.
FEATURES = {
    "encoder-decoder": "is an encoder-decoder model",
    "multimodal": "is multimodal",
    "several models": "is made of several models",
    "layers without attention": "and has no attention",
    "a state that grows along the sequence": r"sequence state is not built",
    "dynamic sparse attention": "dynamic sparse attention",
    "code that branches on its input": "cannot be captured: .*(data-dependent|GuardOnData|Constraints violated)|"
    "by a condition on data|takes another way for more than",
    "attention past transformers' interface": "goes past transformers' attention interface|"
    "another length than its queries|adds the mask to its scores itself|ALiBi is rounded",
    "attention of another kind": r"inferc\.attention does not have|its mask is|the model's mask is|"
    "the paged cache holds|the mask .* is not causal|the cache holds K and V of one attention",
    "positions inside attention": "never reads `positions`",
    "an op without a kernel": "inferc cannot run|has no one axis|of the model's code has no value|"
    "expected tokens, logits",
    "experts of another kind": "experts with",
    "a size that is not fixed": r"a size of the captured graph|no max_position_embeddings|has max_position_embeddings",
}


# Features for which a refusal counts only if the model runs in transformers: where it fails by itself, the refusal says
# nothing about inferc.
OF_CODE = (
    "code that branches on its input",
    "attention past transformers' interface",
    "attention of another kind",
    "an op without a kernel",
    "a size that is not fixed",
)


@dataclass(frozen=True)
class Found:
    """The outcome for a class: `result` is "equal", a key of FEATURES, or what else went wrong; `says` the refusal."""

    result: str
    says: str = ""
    error: float = 0.0


def all_types() -> list[str]:
    """The model types of AutoModelForCausalLM in the installed transformers."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def feature_of(message: str) -> str:
    """The feature that a refusal names, "" where it names none."""
    return next((name for name, said in FEATURES.items() if re.search(said, message)), "")


def prompts() -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(11)
    return [torch.randint(5, 300, (length,), generator=generator).tolist() for length in LENGTHS]


def reference(folder: Path, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], list[Any]]:
    """Return transformers' float32 results: greedy tokens after each prompt, each computed whole, and its logits."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens, logits = [], []
    with torch.no_grad():
        for prompt in prompts:
            ids = list(prompt)
            for _ in range(new_tokens):
                out = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
                if len(ids) == len(prompt):
                    logits.append(out)
                ids.append(int(out[-1].argmax()))
            tokens.append(ids[len(prompt) :])
    return tokens, logits


def fault_of_model(folder: Path) -> str:
    """Return the error that transformers' own code raises for a prompt, or "" for a model that runs."""
    try:
        reference(folder, prompts()[:1], 1)
    except Exception as error:  # noqa: BLE001 (whatever it is)
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def relative_error(found: Any, expected: Any) -> float:
    """The largest difference by the largest value expected; infinite where something is no number."""
    error = float((found - expected).abs().max() / expected.abs().max())
    return float("inf") if math.isnan(error) else error


def try_class(model_type: str, folder: Path, **overrides: Any) -> Found:
    """Make, compile and run a small model of a type; what is not refused is held against transformers' own code."""
    from inferc.backends.lower import LowerConfig, lower
    from inferc.compiler.build import compile
    from inferc.compiler.run_kernels import run_kernels
    from inferc.config import CompileConfig
    from inferc.errors import InfercError
    from inferc.frontend.capture import capture
    from inferc.frontend.checkpoint.load import load
    from inferc.frontend.export import context_length
    from inferc.targets import Target

    has_weights = True
    try:
        make_odd_model(model_type, folder / "model", **overrides)
    except OnlyConfigError:
        has_weights = False
    try:
        checkpoint = load(folder / "model")
        length = "auto" if context_length(checkpoint.config).trained else LENGTH
        how = CompileConfig(dtype="float32", certify="none", max_model_len=length)  # type: ignore[arg-type]
        compile(folder / "model", folder / "out", how)
    except InfercError as error:
        says = str(error).replace(f"{folder}/model", model_type).replace(f"{folder}/", "")
        feature = feature_of(says)
        if has_weights and feature in OF_CODE and (why := fault_of_model(folder / "model")):
            return Found(f"the model that is tried does not run: {why}", says)
        return Found(feature or f"refused without a feature: {type(error).__name__}", says)
    tokens, logits = reference(folder / "model", prompts(), NEW_TOKENS)
    worst = 0.0
    for token_budget in (sum(LENGTHS), 16):
        _, found, greedy = run_kernels(folder / "out", prompts(), NEW_TOKENS, token_budget=token_budget)
        worst = max(worst, *(relative_error(a, b) for a, b in zip(found, logits, strict=True)))
        if worst > TOLERANCE:
            return Found(f"other logits, {worst:.1e} of the largest", error=worst)
        if greedy != tokens:
            return Found("other tokens", error=worst)
    try:  # what is equal in one dtype may be refused in another
        lower(capture(checkpoint, "bfloat16", LENGTH), LowerConfig(Target.parse("cpu")))
    except InfercError as error:
        return Found("equal in float32, and refused in bfloat16", str(error), worst)
    return Found(EQUAL, error=worst)


def read_results() -> dict[str, Found]:
    return {name: Found(**found) for name, found in json.loads(RESULTS.read_text())["classes"].items()}


def version() -> str:
    """The transformers version that the results are of."""
    return str(json.loads(RESULTS.read_text())["transformers"])


def write_results(found: dict[str, Found]) -> None:
    """Write the results without errors, which differ on other processors."""
    import transformers

    classes = {name: {"result": each.result, "says": each.says} for name, each in sorted(found.items())}
    RESULTS.write_text(json.dumps({"transformers": transformers.__version__, "classes": classes}, indent=1) + "\n")


def main(types: list[str]) -> None:
    results = read_results() if RESULTS.exists() and types else {}
    for name in types or all_types():
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = try_class(name, Path(folder))
            except Exception as error:  # noqa: BLE001  whatever is wrong with one class, the others are tried
                traceback.print_exc()
                found = Found(f"{type(error).__name__}: {str(error)[:200]}")
        results[name] = found
        print(f"{name}: {found.result} {found.error:.1e} {found.says[:250]}", flush=True)
        write_results(results)


if __name__ == "__main__":
    main(sys.argv[1:])
