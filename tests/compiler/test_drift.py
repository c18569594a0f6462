"""Whole models through all passes: the lowered program, run paged and chunked, against the captured one.

The budget for float32 rewrites is 1e-5 of the largest logit.
"""

import importlib
from typing import Any

import pytest
import torch
from oracle import export_module, generate_greedy, run_lowered
from random_models import MOE_SIZES, SIZES
from torch import Tensor

from inferc.backends.lower import LowerConfig, lower
from inferc.frontend.checkpoint.load import load_module
from inferc.ir.program import Program, from_json, to_json
from inferc.ir.reference import weight_reader
from inferc.passes.pipeline import PassRecord
from inferc.targets import Target

BUDGET = 1e-5
PROMPT = torch.randint(0, 96, (37,), generator=torch.Generator().manual_seed(3)).tolist()
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-yarn-tied": ("llama", {"rope_parameters": YARN, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mistral-window": ("mistral", {"sliding_window": 8}),
    "mixtral": ("mixtral", MOE_SIZES),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "qwen3_moe-normalised": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
}


OFTEN = ("llama-yarn-tied", "qwen3", "mixtral")


def random_module(family: str, dtype: torch.dtype, **fields: Any) -> Any:
    transformers: Any = importlib.import_module("transformers")
    sizes = {**SIZES, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "vocab_size": 96, **fields}
    config = transformers.AutoConfig.for_model(family, **sizes)
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager").eval()
    for parameter in module.parameters():
        mean, deviation = (0.5, 0.3) if parameter.dim() == 1 else (0.0, 0.2)
        torch.nn.init.normal_(parameter, mean, deviation)
    return module


def captured_logits(program: Program, module: Any, ids: list[int]) -> Tensor:
    inputs = {"token_ids": torch.tensor([ids]), "positions": torch.arange(len(ids))[None]}
    with torch.inference_mode():
        (logits,) = program.run(inputs, weight_reader(program, load_module(module).reader))
    rows: Tensor = logits[0].float()
    return rows


def lowered(program: Program, target: str = "cpu") -> dict[str, PassRecord]:
    return {record.name: record for record in lower(program, LowerConfig(Target.parse(target), block_size=16))}


@pytest.mark.slow
@pytest.mark.quick("qwen3")
@pytest.mark.parametrize(
    "name", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_float32_stays_within_the_budget(name: str) -> None:
    family, fields = MODELS[name]
    module = random_module(family, torch.float32, **fields)
    program = export_module(module, "float32")
    expected = captured_logits(program, module, PROMPT)
    short = captured_logits(program, module, PROMPT[:9])
    copy = from_json(to_json(program))
    records = lowered(program)
    assert records["fuse_rms_norm"].rewrites == 9 if "qwen3" in family else 5
    assert records["fuse_rope"].rewrites == 4
    assert program.to_text().count("inferc.rope_table") == 1
    assert program.kv_groups[0].window == fields.get("sliding_window", 0)
    read = weight_reader(program, load_module(module).reader)
    for chunk_size in (None, 7):
        got = run_lowered(program, read, [PROMPT, PROMPT[:9]], chunk_size)
        for logits, wanted in zip(got, (expected, short), strict=True):
            assert float((logits - wanted).abs().max() / wanted.abs().max()) < BUDGET
    greedy = generate_greedy(program, read, [PROMPT], 3)[0]
    assert greedy[0] == int(expected[-1].argmax())
    again = captured_logits(copy, module, PROMPT + greedy[:2])
    assert greedy == again[-3:].argmax(-1).tolist()


@pytest.mark.slow
def test_bfloat16_is_no_further_from_float32_than_the_captured_program() -> None:
    module = random_module("qwen3", torch.bfloat16)
    wide = export_module(module, "float32")
    exact = captured_logits(wide, module, PROMPT)
    program = export_module(module, "bfloat16")
    before = (captured_logits(program, module, PROMPT) - exact).square().mean().sqrt()
    lowered(program)
    (got,) = run_lowered(program, weight_reader(program, load_module(module).reader), [PROMPT])
    assert float((got - exact).square().mean().sqrt()) <= 1.1 * float(before)


@pytest.mark.slow
def test_saved_copies_of_a_captured_program_lower_alike() -> None:
    program = export_module(random_module("llama", torch.float32), "float32")
    copies = [from_json(to_json(program)) for _ in range(2)]
    for copy in copies:
        assert copy.to_text() == program.to_text()
        lowered(copy)
    assert copies[0].to_text() == copies[1].to_text()
