"""Captured programs: against transformers' logits, and what later stages rely on."""

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from oracle import export_module
from random_models import make_random_model
from safetensors.torch import load_file, save_file
from torch import Tensor, fx

from inferc.compiler.build import compile
from inferc.config import CompileConfig, ContextLength
from inferc.errors import ConfigError, ExportError
from inferc.frontend import capture as capture_module
from inferc.frontend import export, repeat
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import Checkpoint, load, load_module
from inferc.frontend.export import context_length, export_model
from inferc.frontend.reference import reference_logits, reference_model
from inferc.ir import program as program_lib
from inferc.ir import weights as weight_lib
from inferc.ir.model_info import ModelInfo
from inferc.ir.program import Program, target_name

ALL = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe")


def nodes_of(program: Program, op: str) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.op == "call_function" and target_name(node.target) == op]


def run(program: Program, checkpoint: Checkpoint, token_ids: list[int]) -> Tensor:
    inputs = {"token_ids": torch.tensor([token_ids]), "positions": torch.arange(len(token_ids))[None]}
    (logits,) = program.run(inputs, lambda name: weight_lib.read_whole(program.weights[name], checkpoint.reader))
    found: Tensor = logits[0].float()
    return found


def check_against_transformers(checkpoint: Checkpoint, program: Program) -> None:
    token_ids = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    expected = reference_logits(reference_model(checkpoint, "float32"), token_ids)
    torch.testing.assert_close(run(program, checkpoint, token_ids), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ALL)
def test_float32_logits_are_transformers(family: str, tmp_path: Path) -> None:
    checkpoint = load(make_random_model(family, tmp_path / family, num_hidden_layers=1))
    program = export_model(checkpoint, "float32")
    check_against_transformers(checkpoint, program)
    assert len(nodes_of(program, "inferc.attention")) == 1
    assert len(nodes_of(program, "inferc.moe_experts")) == (1 if family in ("mixtral", "qwen3_moe") else 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [family if family in ("qwen3", "mixtral") else pytest.param(family, marks=pytest.mark.slow) for family in ALL],
)
def test_bfloat16_trace(family: str, tmp_path: Path) -> None:
    checkpoint = load(make_random_model(family, tmp_path / family, "bfloat16", num_hidden_layers=1))
    program = export_model(checkpoint, "bfloat16")
    (attention,) = nodes_of(program, "inferc.attention")
    assert all(arg.meta["val"].dtype == torch.bfloat16 for arg in attention.args[:3] if isinstance(arg, fx.Node))
    assert program.weights["rotary_emb.inv_freq"].dtype == torch.float32
    assert {weight.dtype for name, weight in program.weights.items() if "inv_freq" not in name} == {torch.bfloat16}
    token_ids = list(range(3, 40))
    expected = reference_logits(reference_model(checkpoint, "float32"), token_ids)
    assert float((run(program, checkpoint, token_ids) - expected).norm() / expected.norm()) < 0.02


@pytest.fixture(scope="module")
def llama(tiny_llama_folder: Path) -> tuple[Checkpoint, Program]:
    checkpoint = load(tiny_llama_folder)
    return checkpoint, export_model(checkpoint, "bfloat16", 128)


def test_conventions(llama: tuple[Checkpoint, Program]) -> None:
    program = llama[1]
    assert [node.name for node in program.inputs()] == ["token_ids", "positions"]
    assert all({"name", "layer", "val"} <= node.meta.keys() for node in program.graph.nodes if node.op != "output")
    assert [node.meta["layer"] for node in nodes_of(program, "inferc.attention")] == [0, 1]
    names = [node.meta["name"] for node in program.graph.nodes if node.op == "call_function"]
    assert len(set(names)) == len(names)
    assert {"layers.0.attention.out", "layers.1.attention.q_proj.linear", "norm.rsqrt", "lm_head.linear"} <= set(names)
    assert {"layers.1.attention.q_proj.weight", "embed_tokens.weight", "lm_head.weight"} <= program.weights.keys()
    assert str(program.weights["lm_head.weight"]) == "cast(lm_head.weight, bfloat16)"
    vals = [node.meta["val"] for node in program.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert {str(val.device) for val in vals} == {"cpu"}
    (logits,) = program.output().all_input_nodes
    assert logits.meta["val"].shape[2] == program.info.vocab_size
    expected = {"model_type": "llama", "hidden_size": 64, "num_attention_layers": 2, "max_position_embeddings": 256}
    known = {**expected, "max_model_len": 128, "dtype": "bfloat16", "rope": []}
    assert msgspec.structs.replace(program.info, **known) == program.info
    assert program.num_layers == 2


def test_saved_and_loaded(llama: tuple[Checkpoint, Program]) -> None:
    checkpoint, program = llama
    again = program_lib.from_json(json.loads(json.dumps(program_lib.to_json(program))))
    assert again.to_text() == program.to_text()
    assert torch.equal(run(again, checkpoint, [1, 2, 3]), run(program, checkpoint, [1, 2, 3]))


@pytest.mark.slow
def test_a_module_gives_the_program_of_its_folder(llama: tuple[Checkpoint, Program]) -> None:
    module = transformers.AutoModelForCausalLM.from_pretrained(str(llama[0].folder))
    attention = module.config._attn_implementation
    program = export_module(module, "bfloat16", 128)
    assert program.to_text() == llama[1].to_text()
    assert module.config._attn_implementation == attention
    assert torch.equal(run(program, load_module(module), [1, 2, 3]), run(llama[1], llama[0], [1, 2, 3]))


def test_tied_weights_keep_one_name(tmp_path: Path) -> None:
    checkpoint = load(make_random_model("qwen2", tmp_path / "m", tie_word_embeddings=True, num_hidden_layers=1))
    program = export_model(checkpoint, "float32")
    assert program.info.tied_embeddings
    assert "lm_head.weight" not in program.weights
    (head,) = [node for node in nodes_of(program, "aten.linear") if node.meta["name"].startswith("lm_head")]
    assert str(head.args[1].target) == "embed_tokens.weight"  # type: ignore[union-attr]


@pytest.mark.slow
def test_softcap_and_scale(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "sliding_window": 9,
        "query_pre_attn_scalar": 64,
        "attn_logit_softcapping": 30.0,
        "pad_token_id": 0,
    }
    checkpoint = load(make_random_model("gemma2", tmp_path / "m", **sizes))
    program = export_model(checkpoint, "float32")
    assert [node.args[4:] for node in nodes_of(program, "inferc.attention")] == [
        (0.125, "sliding", 9, 30.0),
        (0.125, "causal", 0, 30.0),
    ]
    check_against_transformers(checkpoint, program)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_rope_scaling(rope: dict[str, Any], tmp_path: Path) -> None:
    parameters = {**rope, "rope_theta": 10000.0}
    checkpoint = load(make_random_model("llama", tmp_path / "m", num_hidden_layers=1, rope_parameters=parameters))
    program = export_model(checkpoint, "float32")
    model = reference_model(checkpoint, "float32")
    found = weight_lib.read_whole(program.weights["rotary_emb.inv_freq"], checkpoint.reader)
    assert torch.equal(found, model.model.rotary_emb.inv_freq)
    check_against_transformers(checkpoint, program)


def test_refusals(tiny_llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dtype 'int3' is not known; expected one of float32, bfloat16"):
        capture(tiny_llama_folder, "int3")
    with pytest.raises(ConfigError, match="max_model_len is 0"):
        capture(tiny_llama_folder, "float32", 0)


@pytest.mark.parametrize("length", [0, -3])
def test_a_context_of_no_tokens_is_refused(length: int, tmp_path: Path) -> None:
    folder = make_random_model("llama", tmp_path / "m", num_hidden_layers=1)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": length}))
    with pytest.raises(ConfigError, match=f"max_position_embeddings {length}, expected at least 1"):
        context_length(load(folder).config)
    with pytest.raises(ConfigError, match=f"max_position_embeddings {length}, expected at least 1"):
        capture(folder, "float32")


def test_a_context_that_the_config_does_not_say_must_be_given(tmp_path: Path) -> None:
    config = transformers.BloomConfig(hidden_size=64, n_layer=1, n_head=4, vocab_size=320)
    assert context_length(config) == ContextLength(None, None)
    transformers.BloomForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no max_position_embeddings; give max_model_len"):
        export_model(load(tmp_path), "float32")
    with pytest.raises(ConfigError, match="no max_position_embeddings.*; give --max-model-len"):
        compile(tmp_path, tmp_path / "out", CompileConfig(certify="none"))


def test_code_that_branches_on_data_is_refused(tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = transformers.LlamaForCausalLM.forward

    def forward(self: Any, input_ids: Tensor, position_ids: Tensor, **options: Any) -> Any:
        if input_ids.sum() > 3:
            position_ids = position_ids + 1
        return whole(self, input_ids=input_ids, position_ids=position_ids, **options)

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    with pytest.raises(ExportError, match="LlamaForCausalLM cannot be captured: .*branches on data") as caught:
        capture(tiny_llama_folder, "float32")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_long", "message"),
    [
        (
            lambda count: count > 64,
            "takes another way for more than 64 tokens, and the longest sequence is 256; give --max-model-len 64",
        ),
        (lambda count: count > 5, "LlamaForCausalLM cannot be captured: .*branches on data or on the number of tokens"),
    ],
)
def test_a_branch_on_the_number_of_tokens_is_refused(
    is_long: Callable[[Any], bool], message: str, tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace by torch alone keeps the side of a branch that its example took, for all lengths on that side."""
    whole = transformers.LlamaModel.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = whole(self, *args, **kwargs)
        if is_long(kwargs["input_ids"].shape[1]):
            found.last_hidden_state = found.last_hidden_state * 2
        return found

    monkeypatch.setattr(transformers.LlamaModel, "forward", forward)
    monkeypatch.setattr(capture_module.KEPT, "in_memory", OrderedDict())  # what was captured before is forgotten
    with pytest.raises(ExportError, match=message):
        capture(tiny_llama_folder, "float32", check=False)


@pytest.mark.slow
def test_a_head_that_is_stored_decides_each_time(tmp_path: Path) -> None:
    """Tied by the config and stored: equal to the embedding in one checkpoint, and not in another."""
    equal = make_random_model("llama", tmp_path / "equal", "float32", tie_word_embeddings=True)
    file = equal / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    other = Path(shutil.copytree(equal, tmp_path / "other"))
    save_file(
        {**tensors, "lm_head.weight": tensors["lm_head.weight"] + 1}, other / "model.safetensors", {"format": "pt"}
    )
    found = [capture(folder, "float32", 64, check=False).info.tied_embeddings for folder in (equal, other, equal)]
    assert found == [True, False, True]


@pytest.mark.slow
def test_what_was_captured_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture is kept by config, dtype and length; changing one program changes no other."""
    folder = make_random_model("llama", tmp_path / "m", "float32")
    traced: list[object] = []

    def trace_once(model: Any) -> Any:
        traced.append(model)
        return repeat.trace_once(model)

    monkeypatch.setattr(export, "trace_once", trace_once)
    monkeypatch.setattr(capture_module.KEPT, "in_memory", OrderedDict())  # what was captured before is forgotten
    first = capture(folder, "float32", 64, check=False)
    text = json.dumps(program_lib.to_json(first))
    first.graph.eliminate_dead_code()
    first.info = ModelInfo()
    assert json.dumps(program_lib.to_json(capture(folder, "float32", 64, check=False))) == text and len(traced) == 1
    capture(folder, "float32", 64)
    assert len(traced) == 2, "now it is checked, which takes no copy of a model as small as this in float32"
    for dtype, length in (("float32", 64), ("bfloat16", 64), ("float32", 32)):
        capture(folder, dtype, length, check=False)
    assert len(traced) == 4
    capture(folder, "bfloat16", 64)
    assert len(traced) == 6, "now it is checked, by a capture of a copy"
    twin = make_random_model("llama", tmp_path / "twin", "float32", seed=1)
    assert json.dumps(program_lib.to_json(capture(twin, "float32", 64))) == text
    assert len(traced) == 6, "of other weights, in another folder, it is the same"
    module = load(folder).model_class.from_pretrained(folder)
    for _ in range(2):
        capture(module, "float32", 64, check=False)
    assert len(traced) == 8, "its code may be another by now"
