"""The C structs of codegen/cpp/kernels/inferc_abi.h for ctypes, and the functions of the compiled library."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_int, c_int32, c_int64, c_uint64, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.errors import ArtifactError, ConfigError
from inferc.runtime.artifact.libraries import Library, open_library
from inferc.system.cpu_features import TILES, cpu_features

ABI = 10

# The CPU features that each library's code was compiled to use, by their names in /proc/cpuinfo; best library first.
_AVX2 = frozenset(("avx2", "fma", "f16c"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512vbmi", "avx512_bf16"}
_NEON = frozenset(("asimd", "asimdhp", "fphp", "asimddp", "atomics"))  # Armv8.2 with dot products of int8
ISA_FEATURES: dict[str, frozenset[str]] = {
    "amx": _AVX512 | TILES,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon_bf16": _NEON | {"bf16", "i8mm"},
    "neon": _NEON,
}


OBSERVE = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64)
COLLECTIVE = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_int32, c_void_p, c_int64)


class InfercHost(Structure):
    _fields_ = [
        ("abi", c_uint64),
        ("context", c_void_p),
        ("observe", OBSERVE),
        ("collective", COLLECTIVE),
        ("ranks", c_int64 * 2),
        ("taps", c_void_p),
        ("observed_node", c_int64),
    ]


class InfercTaps(Structure):
    _fields_ = [
        ("places", c_void_p),
        ("row_bytes", c_void_p),
        ("by_logits_row", c_void_p),
        ("seen", c_void_p),
        ("token_rows", c_void_p),
        ("num_token_rows", c_int64),
        ("logits_rows", c_void_p),
        ("num_logits_rows", c_int64),
        ("values", c_void_p),
    ]


class Exchange(Structure):
    """The struct of an exchange: what is sent to and received from each rank of a group.

    Its members are addresses of int64 arrays with one entry per rank.
    """

    _fields_ = [
        ("send", c_void_p),
        ("receive", c_void_p),
        ("send_offsets", c_void_p),
        ("send_bytes", c_void_p),
        ("receive_offsets", c_void_p),
        ("receive_bytes", c_void_p),
    ]


class InfercAdapter(Structure):
    _fields_ = [("data", c_void_p), ("down", c_void_p), ("up", c_void_p), ("ranks", c_void_p)]


class StepArgs(Structure):
    _fields_ = [
        ("abi", c_uint64),
        ("num_tokens", c_int64),
        ("num_seqs", c_int64),
        ("num_rows", c_int64),
        ("max_tokens", c_int64),
        ("max_seqs", c_int64),
        ("max_rows", c_int64),
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("query_start_loc", c_void_p),
        ("seq_lens", c_void_p),
        ("seq_slots", c_void_p),
        ("logits_rows", c_void_p),
        ("slot_mapping", c_void_p),
        ("block_table", c_void_p),
        ("max_blocks", c_void_p),
        ("kv_cache", c_void_p),
        ("weights", c_void_p),
        ("threads", c_void_p),
        ("hidden_in", c_void_p),
        ("hidden_out", c_void_p),
        ("mass_from", c_void_p),
        ("masses", c_void_p),
        ("adapter_ids", c_void_p),
        ("adapters", c_void_p),
        ("num_echoes", c_void_p),
        ("echo_source", c_void_p),
        ("echo_target", c_void_p),
    ]


SAMPLE_ROW_FIELDS = (
    "seq_slots",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seeds",
    "counters",
    "num_logprobs",
)


class SampleArgs(Structure):
    _fields_ = [
        ("step", POINTER(StepArgs)),
        ("vocab_size", c_int64),
        *[(name, c_void_p) for name in SAMPLE_ROW_FIELDS],
        ("bias_starts", c_void_p),
        ("bias_ids", c_void_p),
        ("bias_values", c_void_p),
        ("banned_starts", c_void_p),
        ("banned_ids", c_void_p),
        ("allowed_starts", c_void_p),
        ("allowed_ids", c_void_p),
        ("mask_rows", c_void_p),
        ("masks", c_void_p),
        ("counts", c_void_p),
        ("last_ids", c_void_p),
        ("failed", c_void_p),
        ("token_ids", c_void_p),
        ("logprobs", c_void_p),
        ("ranks", c_void_p),
        ("top_ids", c_void_p),
        ("top_logprobs", c_void_p),
        ("max_top", c_int64),
        ("parents", c_void_p),
    ]


DTYPES = ("float32", "bfloat16", "int8")  # in the order of their numbers in step.h


class ScoreArgs(Structure):
    _fields_ = [
        ("step", POINTER(StepArgs)),
        ("vocab_size", c_int64),
        ("target_ids", c_void_p),
        ("logprobs", c_void_p),
        ("argmax", c_void_p),
    ]


FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "inferc_abi": (c_int, []),
    "inferc_threads_open": (c_void_p, [c_int, c_void_p]),
    "inferc_threads_close": (None, [c_void_p]),
    "inferc_busy": (c_int64, [c_void_p, c_int32, c_int64]),
    "inferc_step": (c_int, [POINTER(InfercHost), POINTER(StepArgs), c_void_p]),
    "inferc_sample": (c_int, [POINTER(InfercHost), POINTER(SampleArgs), c_void_p]),
    "inferc_score": (c_int, [POINTER(InfercHost), POINTER(ScoreArgs), c_void_p]),
    "inferc_copy_slots": (c_int, [c_int32, c_void_p, c_void_p, c_void_p, c_int64]),
    "inferc_pack_blocks": (c_int, [c_int32, c_void_p, c_void_p, c_int64, c_void_p]),
    "inferc_unpack_blocks": (c_int, [c_int32, c_void_p, c_void_p, c_int64, c_void_p]),
}


def load_library(library: Library) -> ctypes.CDLL:
    """Open a compiled step and type its functions. Raises ArtifactError if it is not one, or has another ABI."""
    try:
        opened = open_library(library)
        for name, (result, arguments) in FUNCTIONS.items():
            function = getattr(opened, name)
            function.restype, function.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ArtifactError(f"cannot load {library.path}: {error}; compile the model again") from None
    found = opened.inferc_abi()
    if found != ABI:
        raise ArtifactError(f"{library.path} has step ABI {found}, this runtime has {ABI}; compile the model again")
    return opened


def detect_isa(features: frozenset[str] | None = None) -> tuple[str, ...]:
    """Return the instruction sets that this machine runs, best first."""
    have = cpu_features() if features is None else features
    return tuple(isa for isa, needed in ISA_FEATURES.items() if needed <= have)


def choose_isa(wanted: str, built: tuple[str, ...], features: frozenset[str] | None = None) -> str:
    """Return the library to load: `wanted`, or for "auto" the best one that is built and that this machine runs.

    Raises ConfigError saying what is missing.
    """
    have = cpu_features() if features is None else features
    usable = [isa for isa in detect_isa(have) if isa in built]
    if wanted == "auto":
        if usable:
            return usable[0]
        least = ISA_FEATURES[built[-1]] - have if built else ()
        needed = ", ".join(sorted(least)) or "a library for it"
        raise ConfigError(
            f"this processor cannot run the artifact's {', '.join(built) or 'cpu'} code: it lacks {needed}"
        )
    if wanted in usable:
        return wanted
    if wanted not in built:
        raise ConfigError(f"isa {wanted}: the artifact has no such library; it has {', '.join(built) or 'none'}")
    missing = ", ".join(sorted(ISA_FEATURES[wanted] - have))
    raise ConfigError(f"isa {wanted}: this processor lacks {missing}; use --isa {usable[0] if usable else 'auto'}")


def pointer(array: NDArray[Any] | None) -> int | None:
    return None if array is None else array.ctypes.data


def contiguous(array: NDArray[Any], dtype: type[np.generic]) -> NDArray[Any]:
    return np.ascontiguousarray(array, dtype)
