"""Adapters as PEFT saves them: what is read, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from inferc.errors import ArtifactError, InfercError, UnsupportedError
from inferc.runtime.adapters.peft import read_peft

PREFIX = "base_model.model."
A, B = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(4, 2)


def _write(folder: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    found = {"layer.q.lora_A.weight": A, "layer.q.lora_B.weight": B} if tensors is None else tensors
    save_file({PREFIX + name: value.clone() for name, value in found.items()}, folder / "adapter_model.safetensors")
    facts = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, **config}
    (folder / "adapter_config.json").write_text(json.dumps(facts))
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matrices_are_read_in_any_float_and_b_has_the_scale(tmp_path: Path, dtype: torch.dtype) -> None:
    found = read_peft(_write(tmp_path, {"q.lora_A.weight": A.to(dtype), "q.lora_B.weight": B.to(dtype)})).modules["q"]
    np.testing.assert_array_equal(found.a, A.numpy())
    np.testing.assert_array_equal(found.b, B.numpy() * 3)  # alpha 6 of rank 2
    assert (found.rank, found.is_embedding) == (2, False)


def test_the_scale_follows_the_patterns_and_the_root_of_the_rank(tmp_path: Path) -> None:
    names = ("model.q", "model.v", "other.vv")
    tensors = {f"{name}.{part}.weight": value for name in names for part, value in (("lora_A", A), ("lora_B", B))}
    rooted = read_peft(_write(tmp_path, tensors, use_rslora=True, alpha_pattern={"v": 2, "model.q|x": 4})).modules
    root = np.sqrt(np.float32(2))
    for name, alpha in zip(names, (4, 2, 6), strict=True):
        np.testing.assert_allclose(rooted[name].b, B.numpy() * (alpha / root), rtol=1e-6)


def test_embeddings_have_names_of_their_own(tmp_path: Path) -> None:
    found = read_peft(_write(tmp_path, {"embed.lora_embedding_A": A, "embed.lora_embedding_B": B})).modules["embed"]
    assert found.is_embedding and found.a.shape == (2, 3) and found.b.shape == (4, 2)


def test_a_copy_of_the_models_own_matrix_is_no_part_of_the_adapter(tmp_path: Path) -> None:
    tensors = {"embed.lora_embedding_A": A, "embed.lora_embedding_B": B, "embed.base_layer.weight": torch.ones(3, 4)}
    found = read_peft(_write(tmp_path, tensors))
    assert list(found.modules) == ["embed"] and found.copied == {"embed": (3, 4)}


def test_the_digest_is_of_all_that_counts(tmp_path: Path) -> None:
    first = read_peft(_write(tmp_path / "a")).digest
    assert read_peft(_write(tmp_path / "b")).digest == first
    assert read_peft(_write(tmp_path / "b", lora_alpha=7)).digest != first
    other = {"layer.q.lora_A.weight": A + 1, "layer.q.lora_B.weight": B}
    assert read_peft(_write(tmp_path / "b", other)).digest != first


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"peft_type": "LOHA"}, "peft_type 'LOHA': only LORA is built"),
        ({"use_dora": True}, "use_dora true is not built; merge it into"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \[\"lm_head\"\] is not built"),
        ({"lora_bias": True}, "lora_bias true is not built"),
        ({"bias": "all"}, "bias 'all' is not built"),
        ({"target_parameters": ["experts.down"]}, "target_parameters"),
        ({"init_lora_weights": "pissa_niter_4"}, "'pissa_niter_4': it was trained beside weights that it had changed"),
        ({"lora_alpha": "much"}, "lora_alpha 'much' of layer.q: expected a number"),
        ({"lora_alpha": 10**400}, "lora_alpha 10+ of layer.q: expected a number"),
        ({"kasa_config": {"beta": 1.0}}, "kasa_config"),
        ({"use_bdlora": {"nblocks": 2}}, "use_bdlora"),
        ({"alpha_pattern": ["q"]}, "alpha_pattern: expected an object"),
        ({"alpha_pattern": {"q(": 1}}, r"alpha_pattern 'q\(' is no regular expression"),
    ],
)
def test_what_is_more_than_low_rank_is_refused_by_name(tmp_path: Path, config: dict[str, Any], told: str) -> None:
    with pytest.raises(InfercError, match=told):
        read_peft(_write(tmp_path, **config))


ENDLESS = ("(l*)*x", "(l|l)+x", "(?:[l]+)+x", "l*l*l*x", "(l|l)(l|l)(l|l)x", "(l{1,9}){9}x", "l" * 600)


@pytest.mark.parametrize("pattern", ENDLESS)
def test_expressions_that_could_be_searched_for_ever_are_refused(tmp_path: Path, pattern: str) -> None:
    with pytest.raises(UnsupportedError, match="is not built: expected the end of a module's name, with at most"):
        read_peft(_write(tmp_path, alpha_pattern={pattern: 1}))


@pytest.mark.parametrize("pattern", [r"layer\.q", "l.*q", "(?:q|k)", r"layer\.[pq]", r"^layer\.q", r"lay\w+\.q"])
def test_expressions_as_they_are_written_are_followed(tmp_path: Path, pattern: str) -> None:
    found = read_peft(_write(tmp_path, alpha_pattern={pattern: 4, "q": 8})).modules["layer.q"]
    np.testing.assert_array_equal(found.b, B.numpy() * 2)


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({}, "holds no tensors"),
        ({"q.lora_A.weight": A}, "q has no lora_B"),
        ({"q.lora_A.weight": A, "q.lora_B.weight": A}, r"A \[2, 3\] and B \[2, 3\]; expected \[rank, inputs\]"),
        ({"q.lora_magnitude_vector": A}, "lora_magnitude_vector: expected matrices A and B of LoRA alone"),
        ({"q.lora_A.weight": A * torch.inf, "q.lora_B.weight": B}, "q holds numbers that are not finite"),
        ({"q.lora_A.weight": A, "q.lora_B.weight": B * 1e38}, "q holds numbers that are not finite, as they are or"),
        ({"q.lora_A.weight": A.double() * 1e200, "q.lora_B.weight": B}, "q holds numbers that are not finite"),
        ({"q.lora_A.weight": A, "q.lora_A.default.weight": A, "q.lora_B.weight": B}, "q has two matrices lora_A"),
        (
            {"q.lora_A.weight": A, "q.lora_B.weight": B, "q.lora_embedding_A": A, "q.lora_embedding_B": B},
            "q has lora_A beside lora_embedding_A",
        ),
        ({f"{'q' * 600}.lora_A.weight": A}, "a name of 631 characters; expected 512 or fewer"),
        ({"q.lora_A.weight": A.long(), "q.lora_B.weight": B}, "lora_A.weight is I64; expected F64, F32"),
    ],
)
def test_matrices_that_do_not_fit_are_told(tmp_path: Path, tensors: dict[str, torch.Tensor], told: str) -> None:
    with pytest.raises(InfercError, match=told):
        read_peft(_write(tmp_path, tensors))


def _damaged(folder: Path, how: str) -> None:
    file = folder / "adapter_model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    changed = {
        "empty": b"",
        "cut header": data[: size // 2],
        "cut data": data[:-4],
        "no JSON": data[:8] + b"[" * size + data[8 + size :],
        "huge header": (1 << 60).to_bytes(8, "little") + data[8:],
        "offsets": data.replace(b'"data_offsets":[0,24]', b'"data_offsets":[0,99]'),
        "shape": data.replace(b'"shape":[2,3]', b'"shape":[2,9]'),
        "endless": (size + 2).to_bytes(8, "little") + data[8:].replace(b'"shape":[2,3]', b'"shape":[1e999]'),
        "no offsets": data.replace(b'"data_offsets"', b'"data_offsetz"'),
    }[how]
    file.write_bytes(changed)


HOWS = ("empty", "cut header", "cut data", "no JSON", "huge header", "offsets", "shape", "endless", "no offsets")


@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_file_is_told_in_one_line(tmp_path: Path, how: str) -> None:
    _damaged(_write(tmp_path), how)
    with pytest.raises(ArtifactError) as told:
        read_peft(tmp_path)
    assert "download it again" in str(told.value) and "\n" not in str(told.value)


def test_tensors_of_the_same_bytes_do_not_fill_the_memory(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
    header = json.dumps({f"{PREFIX}{name}.lora_A.weight": entry for name in "abc"}).encode()
    file = _write(tmp_path) / "adapter_model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(24))
    with pytest.raises(ArtifactError, match="b.lora_A.weight shares bytes with others"):
        read_peft(tmp_path)


def test_a_folder_that_is_no_adapter_is_told(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="expected the folder of an adapter, found none"):
        read_peft(tmp_path / "none")
    with pytest.raises(ArtifactError, match="adapter_config.json: No such file"):
        read_peft(tmp_path)
    _write(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ArtifactError, match="is not JSON"):
        read_peft(tmp_path)
    _write(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(UnsupportedError, match="is a pickle, which could run code"):
        read_peft(tmp_path)
