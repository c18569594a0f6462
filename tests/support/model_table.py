"""The document docs/models.md, made of the table of families. Run it to write the document anew."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from all_classes import EQUAL, read_results, version
from families import FAMILIES
from odd_families import ODD_FAMILIES

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/models.md"
HEAD = """\
# Models

Each row is a test (`tests/end_to_end/test_families.py`). It makes a small random model of the family in float32 and
compiles it for the cpu target; the artifact must give the greedy tokens of Hugging Face's code, and all logits of its
prompts within 1e-5 of the largest. Prompts of 1 to 40 tokens run in one batch, whole and in chunks. "In force" lists
the model's features that the test switches off: without one, the same weights give other logits.

`make test` runs some rows under the first transformers version, `make test-all` runs all rows under both. A row that is
"not tried" under the second version runs under the first alone. This page is generated from the tables that the tests
run. A rope that depends on the sequence's length (dynamic NTK, Phi-3's longrope) is fixed at compile time, in all rows.

No code knows a family by its name. Another family works if its graph is captured, passes the check against its own
eager code, and has a kernel for every op; otherwise it is refused, with the op and its place. Attention that a model
computes itself is found by what it computes: a softmax of scaled products with a mask. ALiBi is found too, and is added
by the kernels of cpu, cuda and tensorrt-paged; onnx and tensorrt refuse it by name.

Always refused, with the reason: models with a layer that keeps a state along the sequence (Mamba 2, Jamba), dynamic
sparse attention (DeepSeek V3.2, GLM-MoE-DSA), other biases of scores (Doge; Falcon's ALiBi, which is rounded to
bfloat16 at every position), encoder-decoders, multimodal models, and checkpoints with code of their own.
[All classes](#all-classes) are listed below, with what became of each.

"""
ALL_CLASSES = """
## All classes

Each model type of `AutoModelForCausalLM` in transformers {version} was tried with a small random model whose sizes
divide by little. It was compiled for the cpu target and gave the same tokens, with prompts whole and in chunks, and
logits within 1e-4 of the largest; or it was refused. `make test-all` tries all of them again
(`tests/end_to_end/test_all_classes.py`); `python tests/support/all_classes.py` tries them and writes the results.

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
    lines += [f"| {name} |  | {', '.join(has)} | yes | not tried |" for name, has in sorted(ODD_FAMILIES.items())]
    return HEAD + "\n".join(lines) + "\n" + render_classes()


def render_classes() -> str:
    """The counts, then a line for each class."""
    found = read_results()
    counts = Counter(each.result for each in found.values())
    lines = [f"| of {len(found)} classes | |", "| --- | --- |"]
    lines += [
        f"| {'compiled and equal' if result == EQUAL else f'refused: {result}'} | {count} |"
        for result, count in counts.most_common()
    ]
    lines += ["", "| model type | | says |", "| --- | --- | --- |"]
    for name, each in sorted(found.items()):
        lines.append(
            f"| {name} | {each.result if each.result == EQUAL else f'refused: {each.result}'} | {_short(each.says)} |"
        )
    return ALL_CLASSES.format(version=version()) + "\n".join(lines) + "\n"


def _short(says: str) -> str:
    """The first refusal of several, as a cell of a table."""
    first = re.split(r"; inferc cannot|; expected", says)[0].replace("|", "/")
    return first if len(first) <= 160 else first[:157] + "…"


if __name__ == "__main__":
    DOCUMENT.write_text(render())
