"""Messages about inputs that cannot be read: a GGUF file, a GPTQ checkpoint, the tensors of another model.

They use the words of the person who has the file. A file that is whole is never called damaged, because fetching it
again would bring the same one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from inferc.manifest import MANIFEST

QUANTIZED_NAMES = {
    "aqlm": "AQLM",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "eetq": "EETQ",
    "fbgemm_fp8": "FBGEMM FP8",
    "fp8": "FP8",
    "gptq": "GPTQ",
    "hqq": "HQQ",
    "mlx": "MLX",
    "vptq": "VPTQ",
}
# Methods whose checkpoints never hold whole weights: a config that names one beside whole weights is of another
# checkpoint. By other methods (bitnet, fp8, nvfp4, quark, quanto, torchao) transformers rounds whole weights, and
# activations, as it runs.
ALWAYS_PACKED = frozenset(
    (
        "aqlm",
        "auto-round",
        "awq",
        "bitsandbytes",
        "compressed-tensors",
        "eetq",
        "gptq",
        "higgs",
        "hqq",
        "mlx",
        "spqr",
        "vptq",
    )
)
# Parts of a tensor's name that only quantized checkpoints or adapters have; the first pattern that matches counts.
PACKED = (
    (r"\.g_idx$", "GPTQ"),
    (r"\.qweight$", "GPTQ or AWQ"),
    (r"\.(absmax|nested_absmax|SCB|quant_state\.bitsandbytes__\w+)$", "bitsandbytes"),
    (r"\.weight_packed$", "compressed-tensors"),
    (r"\.weight_scale(_inv)?$", "FP8"),
    (r"\.lora_[AB]\.", "LoRA"),
)
FILES = {
    ".gguf": "a GGUF file, which is not read yet",
    ".safetensors": "one file of a model",
    ".bin": "pickled weights, which can run any code",
    ".pt": "pickled weights, which can run any code",
    ".pth": "pickled weights, which can run any code",
    ".onnx": "an ONNX model",
}
ADAPTER = "a LoRA adapter; merge it into its model, and give that"
FOLDER = "give a Hugging Face folder with config.json and model.safetensors"
# Causal masks that modules of old transformers versions stored, and the number that stood for minus infinity.
OLD_MASK = re.compile(r"(^|\.)(attn|attention|self_attn|self_attention)(\.attention)?\.(bias|masked_bias|causal_mask)$")
# Names of tensors that other tasks have beside the language model: a pooled text, the order of two sentences, classes,
# and the value head of reinforcement learning (`v_head`).
OTHER_HEAD = re.compile(r"(^|\.)pooler\.|^cls\.seq_relationship\.|^(classifier|score|qa_outputs|v_head)\.")
# Wrappers that torch puts around a module, by the part of a tensor's name that each adds; "module" counts in front
# only.
WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "module": "DistributedDataParallel",
}
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
ADAPTER_CONFIG = "adapter_config.json"


def quantized(facts: Any) -> str:
    """Return how a message calls a checkpoint with this `quantization_config`, such as "a GPTQ checkpoint"."""
    method = _method(facts)
    return f"{a(QUANTIZED_NAMES.get(method.lower(), method))} checkpoint"


def is_always_packed(facts: Any) -> bool:
    """Tell whether no checkpoint of this `quantization_config` holds whole weights.

    A checkpoint with whole weights and such a config was then made from another one.
    """
    if isinstance(facts, dict) and facts.get("format") == "dense":
        return False  # compressed-tensors: whole weights on purpose, with rounded activations or keys and values
    return _method(facts).lower() in ALWAYS_PACKED


def _method(facts: Any) -> str:
    fields = facts if isinstance(facts, dict) else {"quant_method": facts}
    usual = "mlx" if {"group_size", "bits"} <= fields.keys() else "quantized"
    return str(fields.get("quant_method", usual))


def a(name: str) -> str:
    """Return a name with its article, "a" or "an"; capitals are spelled letter by letter."""
    return f"{'an' if name[:1] in ('AEFHILMNORSX' if name[:2].isupper() else 'aeio') else 'a'} {name}"


def is_lfs_pointer(path: Path) -> bool:
    """Tell whether a file is the pointer that git leaves for a large file if its LFS extension is not installed."""
    with path.open("rb") as file:
        return file.read(len(LFS_POINTER)) == LFS_POINTER


def lfs_pointer(path: Path) -> str:
    return f"{path} is a Git LFS pointer and not the file itself; fetch it: git lfs install, then git lfs pull"


def packed_tensor(names: Iterable[str]) -> tuple[str, str] | None:
    """Return a tensor that only quantized checkpoints or adapters have, and their kind; None without one."""
    every = sorted(names)
    for pattern, kind in PACKED:
        found = next((name for name in every if re.search(pattern, name)), None)
        if found is not None:
            return found, kind
    return None


def file_instead_of_folder(path: Path) -> str:
    """Return a message that says what a file is where a folder was expected, and what to give."""
    kind = FILES.get(path.suffix.lower())
    with path.open("rb") as file:
        if file.read(4) == b"GGUF":
            kind = FILES[".gguf"]
    if kind == FILES[".gguf"]:
        return (
            f"{path} is {kind}; give the Hugging Face folder that it was made from, with config.json and"
            " model.safetensors"
        )
    if kind == FILES[".safetensors"]:
        return f"{path} is a file, {kind}; give its folder, with config.json beside it"
    return f"{path} is a file{f', {kind}' if kind else ''}; {FOLDER}"


def folder_without_config(folder: Path) -> str:
    """Return a message that says what a folder without config.json holds, and what to give."""
    names = sorted(path.name for path in folder.iterdir())
    if MANIFEST in names:
        return (
            f"{folder} is an artifact, compiled already; give the Hugging Face folder that it was made from, or use it:"
            f" inferc serve {folder}"
        )
    gguf = [name for name in names if name.lower().endswith(".gguf")]
    if gguf:
        return (
            f"{folder}: no config.json, and {gguf[0]} is {FILES['.gguf']}; give the Hugging Face folder that it was"
            " made from"
        )
    if ADAPTER_CONFIG in names:
        return f"{folder}: no config.json but {ADAPTER_CONFIG}: {ADAPTER}"
    own_format = next((name for name in ("params.json", "consolidated.safetensors") if name in names), None)
    if own_format is not None:
        return f"{folder}: no config.json but {own_format}: weights in their maker's own format; {FOLDER}"
    return f"{folder}: no config.json; expected a Hugging Face model folder"


def is_old_mask(name: str, shape: Sequence[int]) -> bool:
    """Tell whether a tensor is a buffer of old attention modules: a mask [1, 1, length, length], or one number."""
    if not OLD_MASK.search(name):
        return False
    return all(size == 1 for size in shape) if name.endswith(".masked_bias") else len(shape) == 4


def other_names(unused: Iterable[str], num_tensors: int, expected: Iterable[str]) -> str:
    """Return a message about the prefix of a file's tensors if it differs from that of the model's tensors.

    unused: the names of the file's tensors that the model has no use for. The message is empty if most of the file's
    `num_tensors` tensors are the model's.
    """
    wanted = Counter(_head(name) for name in expected)
    strange = Counter(head for name in unused if (head := _head(name)) not in wanted)
    if not strange or sum(strange.values()) * 2 < num_tensors:
        return ""
    most, usual = max(strange, key=lambda head: strange[head]), max(wanted, key=lambda head: wanted[head])
    return f"the file's tensors begin with `{most}.`, where the model's begin with `{usual}.`"


def wrapped(unused: Iterable[str], expected: Iterable[str]) -> str:
    """Return a message about tensors whose names have parts that a module's wrapper adds; empty if there is none."""
    known = {part for name in expected for part in _wrappers(name)}
    found = {name: parts for name in unused if (parts := _wrappers(name) - known)}
    if not found:
        return ""
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    every = sorted({part for parts in found.values() for part in parts})
    wrappers = " and ".join(f"`{part}.` is the wrapper of {WRAPPERS[part]}" for part in every)
    return f"tensor {next(iter(found))}{more}: {wrappers}; strip it from the names, or save the module inside it"


def _wrappers(name: str) -> set[str]:
    """Return the parts of a tensor's name that are in WRAPPERS."""
    parts = name.split(".")
    return {
        part
        for index, part in enumerate(parts)
        if part in WRAPPERS and (part != "module" or WRAPPERS.keys() >= set(parts[:index]))
    }


def _head(name: str) -> str:
    return name.partition(".")[0]


def missing_head(model: Any, missing: Sequence[str]) -> str:
    """Return a message for a checkpoint that lacks only the LM head; empty if it lacks something else."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is embedding.weight:
        return ""
    names = {name for name, value in model.named_parameters(remove_duplicate=False) if value is head.weight}
    if set(missing) - names:
        return ""
    return (
        f"no tensor for {missing[0]}, the LM head, which config.json does not tie to the embedding"
        " (tie_word_embeddings is"
        " false): transformers would make up random numbers for it; set tie_word_embeddings to true if the model's head"
        " is its embedding, or give a checkpoint of the language model, not of its base alone"
    )
