"""docs/models.md, made of the table of families. Run it to write the document anew."""

from __future__ import annotations

import re
from pathlib import Path

from families import FAMILIES

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/models.md"
HEAD = """\
# Models

Every row is a test (`tests/end_to_end/test_families.py`): a small random model of the family, float32, compiled for the cpu
target, gives the tokens of Hugging Face's `generate`, with prompts of 1 to 40 tokens in one batch, chunked. What stands under
"in force" is: without it the same weights give other logits. `make test` runs the first transformers version (of families that are alike, one),
`make test-all` both. This page is generated from the table that the test runs. Ropes that depend on the sequence's length
(dynamic NTK, Phi-3's longrope) are fixed at compile, for all of these.

No code knows a family by its name. One that is not here works if its graph is captured, passes the check against its own
eager code, and every op has a kernel; otherwise it is refused with the op and the place. Attention that a model computes by
itself is found by what it computes: a softmax of scaled products with a mask, and with ALiBi, which the cpu and cuda kernels
add (onnx and tensorrt refuse it by name). Always refused, with the reason: models with a state that grows along the sequence
(Mamba 2, Qwen3-Next, Jamba), dynamic sparse attention (DeepSeek V3.2, GLM-MoE-DSA), other biases of scores (Doge; Falcon's
ALiBi, which is rounded to bfloat16 at every position), encoder-decoders, multimodal models, checkpoints with code of their own.

"""


def versions() -> tuple[str, str]:
    """The transformers versions of the two constraints files."""
    found = []
    for name in ("constraints.txt", "constraints-gpu.txt"):
        match = re.search(r"^transformers==(\S+)$", (ROOT / name).read_text(), re.MULTILINE)
        assert match is not None, name
        found.append(match[1])
    return found[0], found[1]


def render() -> str:
    first, second = versions()
    lines = [f"| model type | in force | has besides | {first} | {second} |", "| --- | --- | --- | --- | --- |"]
    for name, family in FAMILIES.items():
        features = " | ".join(", ".join(names) for names in (family.off, family.also))
        known = ["yes" if family.since <= version else f"since {family.since}" for version in (first, second)]
        lines.append(f"| {family.model_type(name)} | {features} | {known[0]} | {known[1]} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
