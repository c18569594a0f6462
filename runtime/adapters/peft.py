"""The reading of LoRA adapters as PEFT saves them: a folder with adapter_config.json and adapter_model.safetensors.

What an adapter may hold besides plain low-rank matrices (DoRA, biases, whole modules) is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from inferc.errors import ArtifactError, UnsupportedError
from inferc.runtime.adapters.tensors import read_tensors
from inferc.runtime.step.plan import F32

CONFIG, TENSORS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
MAX_CONFIG_BYTES = 10_000_000
MERGE = "merge it into the model's weights before they are compiled"
# Fields of adapter_config.json that change what an adapter computes, if they are set, and the values that set nothing.
NOT_BUILT: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False),
    "lora_bias": (None, False),
    "use_qalora": (None, False),
    "modules_to_save": (None, []),
    "trainable_token_indices": (None, [], {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "use_bdlora": (None, False),
    "kasa_config": (None,),
    "monteclora_config": (None,),
}
# A copy of the model's own matrix, which PEFT saves beside adapters of embeddings and LM heads.
COPIED = re.compile(r"^(?P<module>.+)\.base_layer\.weight$")
# Ways of starting an adapter that change the model's own weights, which the file does not hold.
CHANGED_BASE = re.compile(r"pissa|olora|corda|loftq|lora_ga", re.IGNORECASE)
PREFIX = re.compile(r"^base_model\.model\.")
PART = re.compile(r"^(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(\.default)?(\.weight)?$")
_Alpha: TypeAlias = tuple[re.Pattern[str], Any]  # which modules, and their alpha as it is given
MAX_ALPHA = 1e30
MAX_NAME = 512  # characters of a stored name
# Patterns whose matching takes no long time, whatever the name: a search in them holds up the whole process.
MAX_PATTERNS, MAX_REPEATS, MAX_GROUPS, MAX_PATTERN = 10_000, 2, 2, 512


@dataclass(frozen=True)
class LowRank:
    """The matrices of one module: A [rank, in_features], and B [out_features, rank] multiplied by the scale."""

    a: F32
    b: F32
    is_embedding: bool

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class PeftAdapter:
    """An adapter as it is stored: its modules by name, and the SHA-256 of its files, which identifies it.

    copied: the shapes of the model's own matrices that are saved beside it, by module.
    """

    path: Path
    modules: Mapping[str, LowRank]
    digest: str
    copied: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def read_peft(folder: Path) -> PeftAdapter:
    """Read the adapter in a folder.

    Raises ArtifactError for files that are missing or damaged, UnsupportedError for what is refused by name.
    """
    config_bytes = _read(folder, CONFIG)
    config = _config(folder / CONFIG, config_bytes)
    data = _read(folder, TENSORS)
    path = folder / TENSORS
    alphas = _alphas(folder / CONFIG, config)
    parts: dict[str, dict[str, F32]] = {}
    copied: dict[str, tuple[int, ...]] = {}
    for stored, value in read_tensors(path, data).items():
        if len(stored) > MAX_NAME:
            raise UnsupportedError(f"{path}: a name of {len(stored)} characters; expected {MAX_NAME} or fewer")
        name = PREFIX.sub("", stored)
        if copy := COPIED.match(name):
            copied[copy["module"]] = value.shape
            continue
        match = PART.match(name)
        if match is None:
            raise UnsupportedError(f"{path}: {stored}: expected matrices A and B of LoRA alone; {MERGE}")
        found = parts.setdefault(match["module"], {})
        if match["part"] in found:
            raise ArtifactError(f"{path}: {match['module']} has two matrices {match['part']}; expected one of each")
        found[match["part"]] = value
    if not parts:
        raise ArtifactError(f"{path} holds no tensors; expected the matrices of an adapter")
    modules = {module: _low_rank(path, module, found, config, alphas) for module, found in parts.items()}
    return PeftAdapter(folder, modules, hashlib.sha256(config_bytes + b"\0" + data).hexdigest(), copied)


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except OSError as error:
        if not folder.is_dir():
            raise ArtifactError(f"{folder}: expected the folder of an adapter, found none") from None
        if name == TENSORS and (folder / PICKLED).is_file():
            raise UnsupportedError(
                f"{folder}: {PICKLED} is a pickle, which could run code; expected {TENSORS}: save it again with"
                " save_pretrained(…, safe_serialization=True)"
            ) from None
        raise ArtifactError(
            f"{folder / name}: {error.strerror or error}; expected an adapter as PEFT's save_pretrained writes it"
        ) from None


def _config(path: Path, data: bytes) -> Mapping[str, Any]:
    try:
        config = json.loads(data[: MAX_CONFIG_BYTES + 1])
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON: {error}; download it again") from None
    if not isinstance(config, dict):
        raise ArtifactError(f"{path}: expected an object; download it again")
    kind = config.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: peft_type {kind!r}: only LORA is built; {MERGE}")
    for name, unset in NOT_BUILT.items():
        if config.get(name) not in unset:
            raise UnsupportedError(f"{path}: {name} {json.dumps(config[name])[:60]} is not built; {MERGE}")
    if config.get("bias", "none") != "none":
        raise UnsupportedError(f"{path}: bias {config['bias']!r} is not built; {MERGE}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and CHANGED_BASE.match(start):
        raise UnsupportedError(
            f"{path}: init_lora_weights {start!r}: it was trained beside weights that it had changed, which are not"
            " here; save it with path_initial_model_for_weight_conversion, or " + MERGE
        )
    return config


def _low_rank(
    path: Path, module: str, parts: Mapping[str, F32], config: Mapping[str, Any], alphas: Sequence[_Alpha]
) -> LowRank:
    is_embedding = any("embedding" in name for name in parts)
    names = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    if missing := [name for name in names if name not in parts]:
        raise ArtifactError(f"{path}: {module} has no {missing[0]}; download it again")
    if others := sorted(parts.keys() - set(names)):
        raise ArtifactError(f"{path}: {module} has {others[0]} beside {names[0]}; expected those of one kind of layer")
    a, b = (parts[name] for name in names)
    if a.ndim != 2 or b.ndim != 2 or len(a) != b.shape[1] or not len(a):
        raise ArtifactError(
            f"{path}: {module}: A {list(a.shape)} and B {list(b.shape)}; expected [rank, inputs] and [outputs, rank]"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        b = b * np.float32(_scale(path, module, len(a), config, alphas))
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ArtifactError(
            f"{path}: {module} holds numbers that are not finite, as they are or times lora_alpha; it was not saved"
            " well"
        )
    return LowRank(a, b, is_embedding)


def _scale(path: Path, module: str, rank: int, config: Mapping[str, Any], alphas: Sequence[_Alpha]) -> float:
    """Return alpha over the rank, or over its square root with `use_rslora`.

    Source: Kalajdzievski 2023, arXiv:2312.03732.
    """
    alpha: Any = next((own for pattern, own in alphas if pattern.match(module)), config.get("lora_alpha", 8))
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not -MAX_ALPHA <= alpha <= MAX_ALPHA:
        raise ArtifactError(f"{path.parent / CONFIG}: lora_alpha {alpha!r:.60} of {module}: expected a number")
    return float(alpha) / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _alphas(path: Path, config: Mapping[str, Any]) -> list[_Alpha]:
    """Return the keys of `alpha_pattern`, regular expressions for the end of a module's name, with their values.

    Raises UnsupportedError for an expression that could be searched for ever, ArtifactError for what is none.
    """
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict) or len(patterns) > MAX_PATTERNS:
        raise ArtifactError(f"{path}: alpha_pattern: expected an object of at most {MAX_PATTERNS} entries")
    found = []
    for pattern, alpha in patterns.items():
        if not _is_quick(pattern):
            raise UnsupportedError(
                f"{path}: alpha_pattern {pattern!r:.60} is not built: expected the end of a module's name, with at most"
                f" {MAX_GROUPS} groups and {MAX_REPEATS} repetitions of single characters"
            )
        try:
            found.append((re.compile(rf"(.*\.)?({pattern})$"), alpha))
        except (re.error, OverflowError, RecursionError) as error:
            raise ArtifactError(f"{path}: alpha_pattern {pattern!r:.60} is no regular expression: {error}") from None
    return found


def _is_quick(pattern: str) -> bool:
    """Tell whether an expression is surely matched in a time that grows with no more than a low power of the name."""
    plain = re.sub(r"\[[^]]*\]", "x", re.sub(r"\\.", "x", pattern)).replace("(?", "(")
    repeats = re.findall(r"[*+?{]+", plain)
    is_small = len(pattern) <= MAX_PATTERN and len(repeats) <= MAX_REPEATS and plain.count("(") <= MAX_GROUPS
    return is_small and re.search(r"\)[*+?{]", plain) is None
