"""A checkpoint with experts in MXFP4 (gpt-oss) gives the tokens of the model with the numbers written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from greedy import greedy_of
from random_models import make_random_model
from safetensors.torch import load_file, save_file
from torch import Tensor

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ArtifactError
from inferc.frontend.checkpoint.load import load
from inferc.frontend.checkpoint.safetensors import TensorDictReader
from inferc.frontend.reference import reference_model
from inferc.ir import weights as weight_lib

NEW_TOKENS = 8
PROMPTS = [[5, 9, 200, 31], list(range(20, 60))]


def written_out(blocks: Tensor, scales: Tensor) -> Tensor:
    """Byte by byte, as the format's specification says."""
    values = []
    for block, scale in zip(blocks.reshape(-1, 16).tolist(), scales.reshape(-1).tolist(), strict=True):
        for byte in block:
            for bits in (byte & 15, byte >> 4):
                sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
                size = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2.0 ** (exponent - 1)
                values.append((-size if sign else size) * 2.0 ** (scale - 127))
    return torch.tensor(values).view(*scales.shape[:-1], -1)


def random_blocks(*shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[1])
    *lead, size = shape
    blocks = torch.randint(0, 256, (*lead, size // 32, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(121, 124, (*lead, size // 32), generator=generator, dtype=torch.uint8)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(packed, the same numbers written out)"""
    plain, packed = tmp_path_factory.mktemp("plain") / "m", tmp_path_factory.mktemp("packed")
    sizes: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    make_random_model("gpt_oss", plain, sliding_window=24, **sizes)
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name, tensor in tensors.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            num_experts, inner, outer = tensor.shape
            blocks, scales = random_blocks(num_experts, outer, inner)
            tensors[name] = written_out(blocks, scales).transpose(1, 2).contiguous()
            stored.update({f"{name}_blocks": blocks, f"{name}_scales": scales})
        else:
            stored[name] = tensor
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    for file in plain.iterdir():
        if file.suffix in (".json", ".jinja"):
            (packed / file.name).write_bytes(file.read_bytes())
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    return packed, plain


@pytest.mark.slow
def test_tokens_are_those_of_the_numbers(folders: tuple[Path, Path], tmp_path: Path) -> None:
    packed, plain = folders
    compile(packed, tmp_path / "out", CompileConfig(dtype="float32", certify="none"))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager")
    expected = greedy_of(model, PROMPTS, NEW_TOKENS)
    with inferc.LLM(tmp_path / "out") as llm:
        params = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        found = [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params)]
    assert found == expected


def test_the_reference_is_the_same_model(folders: tuple[Path, Path]) -> None:
    packed, plain = (reference_model(load(folder), "float32") for folder in folders)
    ids = torch.tensor([PROMPTS[1]])
    torch.testing.assert_close(packed(ids).logits, plain(ids).logits)
    assert load(folders[0]).dtype == "float32"  # of the other tensors


def test_numbers_are_read_in_rows() -> None:
    blocks, scales = random_blocks(6, 4, 64)
    reader = TensorDictReader({"blocks": blocks, "scales": scales})
    names = (("blocks", blocks), ("scales", scales))
    numbers = weight_lib.mxfp4(*(weight_lib.source(name, tuple(x.shape), x.dtype) for name, x in names))
    expected = written_out(blocks, scales)
    assert torch.equal(weight_lib.read_whole(numbers, reader).float(), expected)
    assert torch.equal(weight_lib.read_rows(numbers, reader, 2, 5).float(), expected[2:5])


def test_blocks_that_do_not_fit_their_scales_are_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    for file in folders[0].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folders[0] / "model.safetensors")
    name = next(name for name in tensors if name.endswith("_scales"))
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match=r"_proj: not MXFP4 \(blocks .* expected 16 bytes a scale\)"):
        compile(tmp_path, tmp_path / "out", CompileConfig(certify="none"))
