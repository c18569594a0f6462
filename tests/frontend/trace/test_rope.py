"""Rope that depends on the sequence's length is fixed for one length, and the Program says so."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from odd_models import make_odd_model
from random_models import make_random_model

from inferc.errors import UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import Checkpoint, load
from inferc.frontend.reference import reference_logits, reference_model
from inferc.frontend.trace import torch_export as trace
from inferc.frontend.trace.rope import fix_rope, longest_context
from inferc.ir import weights as weight_lib
from inferc.ir.model_info import FixedRope

DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [float(2 + index) for index in range(8)],
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def checkpoint_with(rope: dict[str, Any], folder: Path) -> Checkpoint:
    return load(make_random_model("llama", folder, num_hidden_layers=1, rope_parameters=rope))


def default_frequencies() -> torch.Tensor:
    return 1.0 / (10000.0 ** (torch.arange(0, 16, 2, dtype=torch.float32) / 16))


def test_dynamic_is_fixed_by_the_longest_sequence(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(DYNAMIC, tmp_path / "m")
    for length, same in ((256, True), (512, False)):
        program = capture(checkpoint, "float32", length, check=not same)
        found = weight_lib.read_whole(program.weights["rotary_emb.inv_freq"], checkpoint.reader)
        assert torch.allclose(found, default_frequencies()) == same
        assert program.info.rope == [FixedRope("model.rotary_emb", "dynamic", length, 0 if same else 256)]
        assert program.info.max_model_len == length


@pytest.mark.parametrize(("length", "first"), [(64, 1.0), (65, 2.0)])
def test_longrope_takes_short_or_long_factors(length: int, first: float, tmp_path: Path) -> None:
    model = reference_model(checkpoint_with(LONG, tmp_path / "m"), "float32", length)
    found = model.model.rotary_emb.inv_freq.clone()
    assert float(found[0]) == pytest.approx(1.0 / first)
    reference_logits(model, list(range(100)))  # neither a long sequence nor a short one changes them
    reference_logits(model, [1, 2, 3])
    assert torch.equal(model.model.rotary_emb.inv_freq, found)


@pytest.mark.slow
def test_longrope_is_captured_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = checkpoint_with(LONG, tmp_path / "m")
    caplog.set_level(logging.WARNING, "torch.__trace")
    assert capture(checkpoint, "float32", 64).info.rope[0].differs_up_to == 0
    assert caplog.messages == []
    program = capture(checkpoint, "float32", 65)
    assert program.info.rope[0].differs_up_to == 64
    (warning,) = caplog.messages
    assert "longrope's long factors for 65 tokens is used for all lengths" in warning
    assert "for sequences up to 64 tokens compile with --max-model-len 64" in warning
    found = weight_lib.read_whole(program.weights["rotary_emb.inv_freq"], checkpoint.reader)
    assert float(found[0]) == pytest.approx(0.5)


@pytest.mark.quick("32-1.5")
@pytest.mark.parametrize(("length", "scale"), [(32, 1.5), (33, 0.5)])
def test_a_scale_that_depends_on_length_is_fixed_with_the_rope(length: int, scale: float, tmp_path: Path) -> None:
    """Phi-3.5-MoE's: its frequencies are made in every forward pass, by its config alone."""
    rope = {**LONG, "short_factor": [1.0] * 24, "long_factor": [2.0] * 24, "original_max_position_embeddings": 32}
    folder = tmp_path / "m"
    scales = {"short_mscale": 1.5, "long_mscale": 0.5}
    checkpoint = load(make_odd_model("phimoe", folder, num_hidden_layers=1, rope_parameters={**rope, **scales}))
    program = capture(checkpoint, "float32", length)
    fixed = reference_model(checkpoint, "float32", length)
    cos, _ = fixed.model.rotary_emb(torch.zeros(1), torch.zeros(1, 3, dtype=torch.long))
    assert float(cos.max()) == scale
    assert program.info.rope[0].differs_up_to == (0 if length == 32 else 32)


@pytest.mark.slow
def test_what_a_class_makes_of_dynamic_rope_itself_is_kept(tmp_path: Path) -> None:
    """HunYuan's files say "dynamic" and have an alpha, which scales all lengths alike."""
    folder = make_random_model("hunyuan_v1_moe", tmp_path / "m", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    del config["rope_parameters"]
    config["rope_scaling"] = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = load(folder)
    dim, length = checkpoint.config.head_dim, checkpoint.config.max_position_embeddings
    theta = checkpoint.config.rope_parameters["rope_theta"] * 1000.0 ** (dim / (dim - 2))
    wanted = theta ** -(torch.arange(0, dim, 2) / dim)
    program = capture(checkpoint, "float32", length)
    assert torch.allclose(weight_lib.read_whole(program.weights["rotary_emb.inv_freq"], checkpoint.reader), wanted)
    with torch.no_grad():
        own = transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[5, 3, 9]])).logits
    found = reference_logits(reference_model(checkpoint, "float32", length), [5, 3, 9])
    assert torch.allclose(found, own, atol=1e-6)


def test_dynamic_rope_of_a_class_of_its_own_is_refused_where_it_would_be_lost(tmp_path: Path) -> None:
    checkpoint = checkpoint_with(DYNAMIC, tmp_path / "m")
    model = trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "cpu")
    own = model.model.rotary_emb.inv_freq.copy_(default_frequencies() / 2).clone()
    with pytest.raises(UnsupportedError, match="has a dynamic rope of its own.* beyond 256 tokens.*max-model-len 256"):
        fix_rope(model, 257)
    overrides, _ = fix_rope(model, 256)
    assert torch.equal(overrides["model.rotary_emb.inv_freq"], own)


ORIGINAL = {"original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ORIGINAL}


@pytest.mark.parametrize(
    ("rope", "trained", "longest"),
    [
        ({"rope_type": "default"}, 64, 64),
        ({"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 64, 256),
        ({"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 256, 256),
        ({"rope_type": "yarn", "factor": 4.0, **ORIGINAL}, 100, 256),
        ({"rope_type": "dynamic", "factor": 2.0}, 64, 128),
        ({"rope_type": "linear", "factor": 4.0}, 256, 256),
        ({"rope_type": "linear", "factor": 4.0, **ORIGINAL}, 64, 256),
        ({**LLAMA3, "factor": 4.0}, 64, 256),
        ({**LLAMA3, "factor": 32.0}, 1024, 1024),
        ({**LONG, "factor": 4.0}, 64, 256),
        ({**LONG, "factor": None}, 256, 256),
    ],
)
def test_the_longest_context(rope: dict[str, Any], trained: int, longest: int) -> None:
    config = transformers.LlamaConfig(max_position_embeddings=trained, rope_parameters={"rope_theta": 10000.0, **rope})
    assert longest_context(config, trained) == longest


def test_the_longest_context_of_layers_with_their_own_rope() -> None:
    rope = {
        "full_attention": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, **ORIGINAL},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    config = transformers.Olmo3Config(layer_types=list(rope), num_hidden_layers=2, rope_parameters=rope)
    assert longest_context(config, 64) == 256


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    checkpoint = load(make_random_model("llama", tmp_path / "m", num_hidden_layers=1))
    model = trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "meta")
    model.model.rotary_emb.rope_type = "dynamic_wobble"
    with pytest.raises(UnsupportedError, match="dynamic_wobble depends on length"):
        fix_rope(model, 64)
