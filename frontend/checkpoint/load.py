"""The loading of a Hugging Face folder, or of a module in memory: its checked config and the reader of its tensors."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inferc.config import HUB_ID
from inferc.errors import ConfigError, InfercError, UnsupportedError
from inferc.frontend.checkpoint import sentencepiece as sentencepiece_file
from inferc.frontend.checkpoint import unreadable
from inferc.frontend.checkpoint.safetensors import TensorDictReader, TensorSpec, read_folder
from inferc.frontend.model_class import causal_class
from inferc.frontend.trace import torch_export as trace
from inferc.ir.weights import TensorReader
from inferc.manifest import Head
from inferc.system.own_process import uncollected

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
HUB_FILES = ["*.json", "*.safetensors", "*.jinja", *sentencepiece_file.FILES, "*.txt"]
NOT_OF_HUB = ["consolidated*", "*/*"]  # second copies of the weights, in their maker's or another program's format


@dataclass(frozen=True)
class HeadOf:
    """The part of a head's checkpoint that other models lack: the model that it drafts for, and the facts of it.

    token_ids [num_logits] i32: the model's ids of the tokens that it can draft; None: all, in their order.
    """

    model: Checkpoint
    facts: Head
    token_ids: Tensor | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A model's config and tensors; `tensors` holds (shape, dtype) by the checkpoint's names."""

    config: Any  # transformers' PretrainedConfig
    model_class: type[Any]  # transformers' class of the causal language model
    tensors: dict[str, TensorSpec]
    reader: TensorReader
    folder: Path | None = None  # None for a module in memory
    module: torch.nn.Module | None = None
    head: HeadOf | None = None  # for a head that drafts (inferc.frontend.heads)

    @property
    def name(self) -> str:
        """The name of the checkpoint in messages."""
        return str(self.folder) if self.folder else self.model_class.__name__

    @property
    def dtype(self) -> str:
        """The dtype that most bytes of its floating tensors are stored in ("bfloat16", …)."""
        counts: dict[torch.dtype, int] = {}
        for shape, dtype in self.tensors.values():
            if dtype.is_floating_point:  # tensors packed in bytes become bfloat16
                counts[dtype] = counts.get(dtype, 0) + torch.Size(shape).numel() * dtype.itemsize
        most = max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
        return str(most).removeprefix("torch.")


def load(path: str | Path) -> Checkpoint:
    """Open a Hugging Face folder or a hub id ("org/name").

    Reads config.json and the headers of the safetensors files, no tensor. Raises ConfigError, UnsupportedError or
    ArtifactError with one line that says what was found, what was expected and what to do.
    """
    folder = find_folder(path)
    config = read_config(folder)
    reader = read_folder(folder, getattr(config, "transformers_weights", None))
    return Checkpoint(config, _model_class(config), reader.tensors, reader, folder=folder)


def load_config(path: str | Path) -> Checkpoint:
    """Return the model of a config.json alone, in a folder or on the hub, without looking for weights.

    Raises as `load` does for a config that cannot be used.
    """
    file = Path(path).expanduser()
    folder = file.parent if file.name == CONFIG_FILE and file.is_file() else find_folder(path, [CONFIG_FILE])
    return from_config(read_config(folder), folder)


def from_config(config: Any, folder: Path | None) -> Checkpoint:
    """Return a checkpoint with the tensors that the config's class would have, none of which can be read."""
    model_class = _model_class(config)
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32  # transformers' own default
    model = trace.build(model_class, config, dtype, "meta")
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    reader = TensorDictReader({name: value for name, value in model.state_dict().items() if name not in tied})
    return Checkpoint(config, model_class, reader.tensors, reader, folder=folder)


def load_module(module: torch.nn.Module) -> Checkpoint:
    """Return the checkpoint of a transformers causal language model in memory, checked as `load` checks a folder."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        raise UnsupportedError(
            f"{type(module).__name__} is not a transformers model; give a causal LM built from a config"
        )
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ConfigError(f"{type(module).__name__} has parameters on the meta device; load its weights first")
    _refuse_hooks(module)
    check_config(module.config, module.config.to_dict(), type(module).__name__)
    reader = TensorDictReader(module.state_dict())
    return Checkpoint(module.config, type(module), reader.tensors, reader, module=module)


def _refuse_hooks(module: torch.nn.Module) -> None:
    """Raise UnsupportedError if a hook runs around a submodule's forward pass, since a compile would lose it."""
    for path, part in module.named_modules():
        hooks = [*part._forward_pre_hooks.values(), *part._forward_hooks.values()]
        # transformers leaves its own hooks behind once hidden states were asked for; they only read.
        found = [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith("transformers.")]
        if found:
            name = getattr(found[0], "__qualname__", type(found[0]).__name__)
            raise UnsupportedError(
                f"{type(module).__name__}: {path or 'the model'} has a forward hook ({name}), which cannot be compiled;"
                " remove it, or write what it does into the model's class"
            )


def find_folder(path: str | Path, files: list[str] | None = None) -> Path:
    """Return the folder that `path` names; a hub id is downloaded (only `files` of it, if given)."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise ConfigError(unreadable.file_instead_of_folder(folder))
    if not HUB_ID.fullmatch(str(path)):
        raise ConfigError(f"{path}: no such folder; give a Hugging Face folder or a hub id like org/name")
    import huggingface_hub

    try:
        wanted = files or HUB_FILES
        return Path(huggingface_hub.snapshot_download(str(path), allow_patterns=wanted, ignore_patterns=NOT_OF_HUB))
    except Exception as error:  # the client's errors have no common base class: network, not found, gated, disk
        reason = str(error).strip().splitlines()
        raise ConfigError(
            f"{path}: no such folder, and not downloaded as a hub id"
            f" ({type(error).__name__}: {reason[0][:160] if reason else 'no reason given'});"
            " give the path of a folder, or check the name and the network"
        ) from error


def read_config(folder: Path) -> Any:
    """Return the transformers config of a folder, and raise if it is of a kind that cannot be compiled."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise ConfigError(unreadable.folder_without_config(folder))
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f"{file}: not JSON ({error}); mend it, or fetch it anew if it was cut short") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("model_type"), str):
        raise ConfigError(f"{file}: no model_type; expected the config.json of a transformers model")
    with uncollected():
        from transformers import AutoConfig
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    model_type = raw["model_type"]
    if model_type not in CONFIG_MAPPING_NAMES:
        if "auto_map" in raw:
            raise UnsupportedError(
                f"{folder}: model_type {model_type} needs code from the checkpoint (trust_remote_code), which inferc"
                " never runs; use a version of the model that transformers has the code of"
            )
        raise UnsupportedError(
            f"{folder}: model_type {model_type} is not known to the installed transformers; upgrade it, or check"
            " config.json"
        )
    _refuse_quantized(raw, str(folder), folder)
    try:
        with uncollected():  # it imports the model's module
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # a config class may raise anything
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{file}: not a valid {model_type} config ({type(error).__name__}: {reason})") from error
    check_config(config, raw, str(folder))
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the compiler reads the unpacked values
    return config


def _refuse_quantized(raw: dict[str, Any], where: str, folder: Path | None = None) -> None:
    """Raise UnsupportedError for a checkpoint whose config says that it is quantized.

    If its folder is given, the message also says whether the files hold packed or whole weights.
    """
    facts = raw.get("quantization_config") or raw.get("quantization")
    if not facts or (isinstance(facts, dict) and facts.get("quant_method") == "mxfp4"):
        return  # MXFP4 is read, as bfloat16 values
    name = "quantization_config" if raw.get("quantization_config") else "quantization"
    if folder is not None and _has_whole_weights(folder, raw.get("transformers_weights")):
        found = (
            f"{where}: config.json calls it {unreadable.quantized(facts)} ({name}), and nothing in its files is packed"
        )
        if unreadable.is_always_packed(facts):
            raise UnsupportedError(
                f"{found}; delete {name} from config.json, which merging an adapter leaves behind, to compile the"
                " weights as they are"
            )
        raise UnsupportedError(
            f"{found}: by such a config transformers rounds weights and activations as it runs, which is not built;"
            " use another checkpoint"
        )
    raise UnsupportedError(
        f"{where}: {unreadable.quantized(facts)} ({name} in config.json), whose packed weights are not read yet;"
        " use the original, unquantized model"
    )


def _has_whole_weights(folder: Path, named: str | None) -> bool:
    try:
        tensors = read_folder(folder, named).tensors
    except InfercError:
        return False
    is_whole = all(dtype.is_floating_point and dtype.itemsize > 1 for _, dtype in tensors.values())
    return is_whole and unreadable.packed_tensor(tensors) is None


def check_config(config: Any, raw: dict[str, Any], where: str) -> None:
    """Raise UnsupportedError, with what was found, unless a model is text-only, attention-only and decoder-only."""
    _refuse_quantized(raw, where)
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedError(f"{where}: {kind} is an encoder-decoder model; expected a decoder-only language model")
    _refuse_several_models(config, where)
    _refuse_state(config, where)
    if getattr(config, "index_topk", None):
        raise UnsupportedError(
            f"{where}: {kind} chooses the {config.index_topk} keys that each query sees (index_topk, in the attention"
            " of every layer): dynamic sparse attention; expected causal, sliding or chunked attention"
        )


def _refuse_several_models(config: Any, where: str) -> None:
    """Raise UnsupportedError for a model that is made of several models, such as one for each modality.

    A part of a config that has no layers (dbrx's attn_config) is a group of fields, and no model.
    """
    named = {name: getattr(config, name, None) for name in getattr(config, "sub_configs", {})}
    parts = [name for name, part in named.items() if hasattr(part, "num_hidden_layers") or _is_modality(name, part)]
    if not parts:
        return
    if any(_is_modality(name, named[name]) for name in parts) or "text_config" in parts:
        raise UnsupportedError(
            f"{where}: {config.model_type} is multimodal ({', '.join(parts)}); expected a text-only model: give the"
            " language model alone"
        )
    raise UnsupportedError(
        f"{where}: {config.model_type} is made of several models ({', '.join(parts)}); expected one decoder of text"
        " tokens"
    )


MODALITIES = ("vision", "image", "audio", "video", "speech")


def _is_modality(name: str, part: Any) -> bool:
    return part is not None and any(modality in name for modality in MODALITIES)


def _refuse_state(config: Any, where: str) -> None:
    """Raise UnsupportedError for a model with layers that are not attention.

    A class that can have such layers may have none by its config.
    """
    types = [str(layer) for layer in getattr(config, "layer_types", None) or ()]
    other = [index for index, layer in enumerate(types) if not layer.endswith("attention") or "linear" in layer]
    if not other and (types or not getattr(_model_class(config), "_is_stateful", False)):
        return
    if other and types[other[0]] in ("mlp", "moe"):
        raise UnsupportedError(
            f"{where}: layer {other[0]} of {config.model_type} is of type {types[other[0]]} and has no attention;"
            " expected attention in every layer"
        )
    found = f"layer {other[0]} of type {types[other[0]]}" if other else "a recurrent state"
    raise UnsupportedError(
        f"{where}: {config.model_type} has {found}; expected attention in every layer (sequence state is not built)"
    )


def _model_class(config: Any) -> type[Any]:
    """Return the causal language model class of a config; raise UnsupportedError if transformers has none."""
    found = causal_class(config)
    if found is None:
        raise UnsupportedError(
            f"model_type {config.model_type} is not a causal language model in transformers; expected one that"
            " generates text"
        )
    return found
