"""The C structs of codegen/cpp/kernels/inferc_abi.h for ctypes, and the compiled library's functions."""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, Structure, c_int, c_int32, c_int64, c_long, c_uint64, c_void_p
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.errors import ArtifactError, ConfigError
from inferc.runtime.artifact.libraries import Library, open_library

log = logging.getLogger(__name__)

ABI = 5

# Features that each library's code was compiled to use, as /proc/cpuinfo names them; best first.
_AVX2 = frozenset(("avx2", "fma", "f16c"))
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512vbmi", "avx512_bf16"}
TILES = frozenset(("amx_tile", "amx_int8", "amx_bf16"))
_NEON = frozenset(("asimd", "asimdhp", "fphp", "asimddp", "atomics"))  # Armv8.2 with dot products of int8
ISA_FEATURES: dict[str, frozenset[str]] = {
    "amx": _AVX512 | TILES,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "neon_bf16": _NEON | {"bf16", "i8mm"},
    "neon": _NEON,
}

# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) on x86-64: asm/prctl.h and asm/fpu/types.h of Linux.
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18

OBSERVE = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_int32, c_void_p, c_int64, c_int64)
COLLECTIVE = ctypes.CFUNCTYPE(None, c_void_p, c_int32, c_int32, c_void_p, c_int64)


class InfercHost(Structure):
    _fields_ = [
        *(("abi", c_uint64), ("context", c_void_p), ("observe", OBSERVE), ("collective", COLLECTIVE)),
        *(("ranks", c_int64 * 2), ("taps", c_void_p)),
    ]


class InfercTaps(Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("places", "row_bytes", "by_logits_row", "seen")),
        *(("token_rows", c_void_p), ("num_token_rows", c_int64)),
        *(("logits_rows", c_void_p), ("num_logits_rows", c_int64)),
        ("values", c_void_p),
    ]


class Exchange(Structure):
    """Per rank of a group, what goes to it and what comes from it; addresses of i64 arrays."""

    _fields_ = [
        *((name, c_void_p) for name in ("send", "receive", "send_offsets", "send_bytes")),
        *((name, c_void_p) for name in ("receive_offsets", "receive_bytes")),
    ]


class StepArgs(Structure):
    _fields_ = [
        ("abi", c_uint64),
        *((name, c_int64) for name in ("num_tokens", "num_seqs", "num_rows", "max_tokens", "max_seqs", "max_rows")),
        *((name, c_void_p) for name in ("token_ids", "positions", "query_start_loc", "seq_lens", "seq_slots")),
        *((name, c_void_p) for name in ("logits_rows", "slot_mapping", "block_table", "max_blocks", "kv_cache")),
        *((name, c_void_p) for name in ("weights", "threads", "hidden_in", "hidden_out", "mass_from", "masses")),
    ]


SAMPLE_ROW_FIELDS = (
    *("seq_slots", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "seeds", "counters", "num_logprobs"),
)


class SampleArgs(Structure):
    _fields_ = [
        ("step", POINTER(StepArgs)),
        ("vocab_size", c_int64),
        *((name, c_void_p) for name in SAMPLE_ROW_FIELDS),
        *((name, c_void_p) for name in ("bias_starts", "bias_ids", "bias_values", "banned_starts", "banned_ids")),
        *((name, c_void_p) for name in ("allowed_starts", "allowed_ids", "counts", "last_ids")),
        *((name, c_void_p) for name in ("failed", "token_ids", "logprobs", "ranks", "top_ids", "top_logprobs")),
        ("max_top", c_int64),
    ]


DTYPES = ("float32", "bfloat16", "int8")  # as numbered in step.h


class ScoreArgs(Structure):
    _fields_ = [
        ("step", POINTER(StepArgs)),
        ("vocab_size", c_int64),
        *((name, c_void_p) for name in ("target_ids", "logprobs", "argmax")),
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
    """Open a compiled step and type its functions. Raises ArtifactError if it is not one, or of another ABI."""
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


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The features this machine's processors have, and the kernel lets this process use, by the kernel's names."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    named = ("flags", "Features")  # on x86-64, on AArch64
    flags = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith(named)]
    features = frozenset.intersection(*flags) if flags else frozenset()
    return features if not features & TILES or tiles_allowed() else features - TILES


@lru_cache(maxsize=1)
def tiles_allowed() -> bool:
    """Asks the kernel for the tile registers of AMX, which no thread of a process may touch before.

    Only for processors that have them: the number of the call is x86-64's.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, c_long(_ARCH_REQ_XCOMP_PERM), c_long(_XFEATURE_XTILEDATA)) == 0:
        return True
    log.warning("this processor has AMX, but the kernel gives no tiles: %s", os.strerror(ctypes.get_errno()))
    return False


def detect_isa(features: frozenset[str] | None = None) -> tuple[str, ...]:
    """The instruction sets that this machine runs, best first."""
    have = cpu_features() if features is None else features
    return tuple(isa for isa, needed in ISA_FEATURES.items() if needed <= have)


def choose_isa(wanted: str, built: tuple[str, ...], features: frozenset[str] | None = None) -> str:
    """The library to load: `wanted`, or with "auto" the best that is built and that this machine runs.

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
