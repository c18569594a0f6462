"""The shipped models in bfloat16: no further from their float32 selves than Hugging Face's own bfloat16 run is."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferc.compiler.build import compile
from inferc.config import CompileConfig

pytestmark = pytest.mark.slow

SHIPPED = Path(__file__).parents[2] / "examples/models"
WINDOW, WINDOWS = 512, 4  # tokens of eval.txt


@pytest.mark.parametrize(
    "name", ["tiny-llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiny-draft", "tiny-moe"))]
)
def test_kl_and_top1_are_no_worse_than_hugging_faces_own(name: str, tmp_path: Path) -> None:
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from inferc.compiler.run_kernels import run_kernels

    folder = SHIPPED / name
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (SHIPPED / "eval.txt").read_text(encoding="utf-8")[: 8 * WINDOW * WINDOWS]
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    windows = [ids[start : start + WINDOW] for start in range(0, WINDOW * WINDOWS, WINDOW)]
    assert [len(window) for window in windows] == [WINDOW] * WINDOWS

    def hugging_face(dtype: torch.dtype) -> torch.Tensor:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        with torch.inference_mode():
            return torch.cat([model(input_ids=torch.tensor([window])).logits[0] for window in windows])

    compile(folder, tmp_path / "out", CompileConfig(dtype="bfloat16", certify="none"))
    ours = torch.cat(run_kernels(tmp_path / "out", windows, num_greedy=0)[1])
    wide = hugging_face(torch.float32).log_softmax(-1)

    def distance(logits: torch.Tensor) -> tuple[float, float, int]:
        """KL(float32 || logits) in nats: its median and its mean; positions whose most likely token differs.

        The mean leaves out the furthest hundredth: where two experts are equally likely to within rounding, a router
        takes either, and the few positions where it does so outweigh all others in any run.
        """
        found = logits.float().log_softmax(-1)
        kl = (wide.exp() * (wide - found)).sum(-1).sort().values
        return (
            float(kl.median()),
            float(kl[: len(kl) * 99 // 100].mean()),
            int((found.argmax(-1) != wide.argmax(-1)).sum()),
        )

    ours_is, theirs_is = distance(ours), distance(hugging_face(torch.bfloat16))
    assert 0 < ours_is[0] <= theirs_is[0]
    assert ours_is[1] <= theirs_is[1]
    assert ours_is[2] <= theirs_is[2]
