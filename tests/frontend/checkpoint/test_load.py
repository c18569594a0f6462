"""Opening a folder, a hub id or a module; what cannot be compiled is refused by name, in one line."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.utils._paths import filter_repo_objects
from safetensors.torch import save_file

from inferc.errors import ConfigError, InfercError, UnsupportedError
from inferc.frontend.checkpoint.load import load, load_module
from inferc.frontend.trace import torch_export as trace

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 32,
}
VISION = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}, "vision_config": {}}
UNKNOWN = {"model_type": "no_such_model"}


def write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file({"model.norm.weight": torch.zeros(16)}, folder / "model.safetensors")
    return folder


def test_load_reads_config_and_specs(tmp_path: Path) -> None:
    checkpoint = load(write(tmp_path, LLAMA))
    assert checkpoint.config.hidden_size == 16
    assert checkpoint.model_class is transformers.LlamaForCausalLM
    assert checkpoint.tensors == {"model.norm.weight": ((16,), torch.float32)}
    assert checkpoint.dtype == "float32"
    assert checkpoint.reader.rows("model.norm.weight", 0, 2).tolist() == [0.0, 0.0]


def test_weights_that_the_config_names(tmp_path: Path) -> None:
    folder = write(tmp_path, {**LLAMA, "transformers_weights": "other.safetensors"})
    save_file({"model.norm.weight": torch.zeros(16, dtype=torch.bfloat16)}, folder / "other.safetensors")
    assert load(folder).tensors == {"model.norm.weight": ((16,), torch.bfloat16)}


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ("not json", ConfigError, "not JSON"),
        ([], ConfigError, "no model_type"),
        ({"hidden_size": 4}, ConfigError, "no model_type"),
        (UNKNOWN, UnsupportedError, "no_such_model is not known to the installed transformers"),
        ({**UNKNOWN, "auto_map": {"AutoModel": "x.Y"}}, UnsupportedError, "trust_remote_code"),
        ({"model_type": "vit"}, UnsupportedError, "vit is not a causal language model"),
        ({"model_type": "t5"}, UnsupportedError, "encoder-decoder|not a causal language model"),
        ({"model_type": "bart"}, UnsupportedError, "bart is an encoder-decoder model"),
        (VISION, UnsupportedError, r"gemma3 is multimodal \(.*vision_config"),
        ({"model_type": "mamba"}, UnsupportedError, "mamba has .*sequence state is not built"),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4}, UnsupportedError, "linear_attention"),
        ({**LLAMA, "hidden_size": "wide"}, ConfigError, "not a valid llama config"),
    ],
)
def test_config_refusals(config: object, error: type[InfercError], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message) as caught:
        load(write(tmp_path, config))
    assert "\n" not in str(caught.value)


QUANTIZED = [
    (
        {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "qweight",
        "a GPTQ checkpoint",
        "quantization_config",
    ),
    ({"quantization_config": {"quant_method": "fp8"}}, "weight_scale_inv", "an FP8 checkpoint", "quantization_config"),
    ({"quantization_config": {"bits": 4}}, "qweight", "a quantized checkpoint", "quantization_config"),
    ({"quantization_config": "gptq"}, "qweight", "a GPTQ checkpoint", "quantization_config"),
    ({"quantization": {"group_size": 64, "bits": 4}}, "scales", "an MLX checkpoint", "quantization"),
]


@pytest.mark.parametrize(("fields", "part", "what", "name"), QUANTIZED)
def test_a_quantized_checkpoint_is_called_by_its_kind(
    fields: dict[str, Any], part: str, what: str, name: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, {**LLAMA, **fields})
    packed = {
        f"model.layers.0.mlp.up_proj.{part}": torch.ones(2, 2),
        "model.norm.weight": torch.zeros(2, dtype=torch.int32),
    }
    save_file(packed, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedError, match=rf"{what} \({name} in config.json\), whose packed weights are not read yet"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("facts", "what", "name"),
    [
        ({"quant_method": "gptq", "bits": 4}, "a GPTQ checkpoint", "quantization_config"),
        ({"quant_method": "AWQ", "bits": 4}, "an AWQ checkpoint", "quantization_config"),
        ("gptq", "a GPTQ checkpoint", "quantization_config"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "a bitsandbytes checkpoint", "quantization_config"),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "a compressed-tensors checkpoint",
            "quantization_config",
        ),
        ({"quant_method": "hqq"}, "an HQQ checkpoint", "quantization_config"),
        ({"group_size": 64, "bits": 4}, "an MLX checkpoint", "quantization"),
    ],
)
def test_a_config_that_calls_whole_weights_packed_is_told_so(facts: Any, what: str, name: str, tmp_path: Path) -> None:
    """Merging an adapter into a quantized model leaves such a config."""
    with pytest.raises(
        UnsupportedError, match=rf"calls it {what} \({name}\), and nothing in its files is packed; delete {name}"
    ):
        load(write(tmp_path, {**LLAMA, name: facts}))


@pytest.mark.parametrize(
    ("facts", "what"),
    [
        (
            {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"},
            "a BitNet checkpoint",
        ),
        ({"quant_method": "fp8", "activation_scheme": "dynamic"}, "an FP8 checkpoint"),
        ({"quant_method": "fbgemm_fp8"}, "an FBGEMM FP8 checkpoint"),
        ({"quant_method": "torchao"}, "a torchao checkpoint"),
        ({"quant_method": "quanto"}, "a quanto checkpoint"),
        ({"quant_method": "compressed-tensors", "format": "dense"}, "a compressed-tensors checkpoint"),
        ({"quant_method": "some-new-one"}, "a some-new-one checkpoint"),
        ({"bits": 4}, "a quantized checkpoint"),
    ],
)
def test_whole_weights_that_are_rounded_as_the_model_runs_are_not_to_be_used_as_they_are(
    facts: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """Without the field such a model would compile, and give other numbers than the one that was trained."""
    message = (
        rf"calls it {what} \(quantization_config\), and nothing in its files is packed: .* rounds weights and"
        " activations as it runs, which is not built; use another checkpoint"
    )
    with pytest.raises(UnsupportedError, match=message) as caught:
        load(write(tmp_path, {**LLAMA, "quantization_config": facts}))
    assert "delete" not in str(caught.value) and "\n" not in str(caught.value)


def test_remote_code_is_not_needed_for_a_known_model(tmp_path: Path) -> None:
    config = {**LLAMA, "auto_map": {"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"}}
    assert load(write(tmp_path, config)).model_class is transformers.LlamaForCausalLM


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no config.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        (
            "model.gguf",
            b"",
            "is a GGUF file, which is not read yet; give the Hugging Face folder that it was made from",
        ),
        ("ggml-model-q4", b"GGUF\3\0\0\0", "is a GGUF file, which is not read yet"),
        ("model.safetensors", b"", "is a file, one file of a model; give its folder"),
        ("pytorch_model.bin", b"", "is a file, pickled weights, which can run any code; give a Hugging Face folder"),
        ("model.onnx", b"", "is a file, an ONNX model; give a Hugging Face folder"),
        ("README", b"hello", "is a file; give a Hugging Face folder with config.json and model.safetensors"),
    ],
)
def test_a_file_is_not_a_folder(name: str, start: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(start)
    with pytest.raises(ConfigError, match=message):
        load(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("model-Q4_K_M.gguf", "no config.json, and model-Q4_K_M.gguf is a GGUF file, which is not read yet"),
        ("adapter_config.json", "a LoRA adapter; merge it into its model"),
        ("consolidated.safetensors", "weights in their maker's own format; give a Hugging Face folder"),
        ("notes.txt", "no config.json; expected a Hugging Face model folder"),
    ],
)
def test_a_folder_of_something_else(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_folder_whose_weights_are_a_gguf_file(tmp_path: Path) -> None:
    write(tmp_path, LLAMA)
    (tmp_path / "model.safetensors").rename(tmp_path / "llama.gguf")
    with pytest.raises(
        UnsupportedError, match="llama.gguf is a GGUF file, which is not read yet; expected model.safetens"
    ):
        load(tmp_path)


@pytest.mark.parametrize("path", ["/no/such/folder", "nothing", "a/b/c"])
def test_missing_folder(path: str) -> None:
    with pytest.raises(ConfigError, match=f"{path}: no such folder"):
        load(path)


def test_hub_id_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_args: Any, **_options: Any) -> str:
        raise ConnectionError("no route to host\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ConfigError, match="org/name: no such folder, and not downloaded.*no route to host") as caught:
        load("org/name")
    assert "\n" not in str(caught.value)


def test_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A hub repository's files that are read are downloaded, and its weights in another format are not."""
    folder, files = write(tmp_path, LLAMA), list[str]()
    weights = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    read = ["config.json", *weights, "tokenizer.json", "chat_template.jinja", "tokenizer.model"]
    others = [
        "consolidated.safetensors",
        "consolidated.safetensors.index.json",
        "original/model.safetensors",
        "README.md",
    ]

    def download(_: str, **patterns: Any) -> str:
        files.extend(filter_repo_objects([*read, *others], **patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("org/name").folder == folder and files == read


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "nosuch"}, "knows no 'nosuch' (hidden_act in config.json)"),
        (
            {"rope_parameters": {"rope_type": "nosuch", "rope_theta": 1e4}},
            "knows no 'nosuch' (rope_parameters.rope_type in config.json)",
        ),
    ],
)
def test_a_name_that_transformers_does_not_know_is_found_in_the_config(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint = load(write(tmp_path, {**LLAMA, **fields}))
    with pytest.raises(ConfigError) as caught:
        trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "meta")
    assert str(caught.value) == (
        f"LlamaForCausalLM cannot be built: transformers {transformers.__version__} {message}; correct the field, or"
        " upgrade transformers"
    )


def test_another_key_that_is_missing_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_args: Any, **_options: Any) -> None:
        raise KeyError("factor")

    checkpoint = load(write(tmp_path, LLAMA))
    monkeypatch.setattr(checkpoint.model_class, "_from_config", fails)
    with pytest.raises(ConfigError, match=r"cannot be built from its config \('factor'\); is config.json damaged\?"):
        trace.build(checkpoint.model_class, checkpoint.config, torch.float32, "meta")


def test_modules() -> None:
    config = transformers.LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "model_type"})
    module = transformers.LlamaForCausalLM(config)
    checkpoint = load_module(module)
    assert checkpoint.name == "LlamaForCausalLM"
    assert checkpoint.tensors["lm_head.weight"] == ((32, 16), torch.float32)
    with pytest.raises(UnsupportedError, match="Linear is not a transformers model"):
        load_module(torch.nn.Linear(2, 2))
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(config)
    with pytest.raises(ConfigError, match="meta device"):
        load_module(empty)


def test_a_module_with_hooks_is_refused() -> None:
    config = transformers.LlamaConfig(**{key: value for key, value in LLAMA.items() if key != "model_type"})
    module: Any = transformers.LlamaForCausalLM(config)
    module(input_ids=torch.tensor([[1, 2]]), output_hidden_states=True)  # installs hooks of transformers' own
    load_module(module)
    for register in (module.model.layers[0].register_forward_hook, module.model.norm.register_forward_pre_hook):
        handle = register(lambda *_args: None)
        with pytest.raises(UnsupportedError, match=r"LlamaForCausalLM: model\.(layers\.0|norm) has a forward hook"):
            load_module(module)
        handle.remove()
    load_module(module)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "consolidated.safetensors",
            "no config.json but consolidated.safetensors: weights in their maker's own format",
        ),
        ("params.json", "no config.json but params.json: weights in their maker's own format"),
        (
            "engine.json",
            "is an artifact, compiled already; give the Hugging Face folder that it was made from, or use it",
        ),
    ],
)
def test_a_folder_is_called_by_what_lies_in_it(name: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)
