"""The features of this machine's processors that code may use, with the kernel's permission for tile registers."""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import c_long
from functools import lru_cache
from pathlib import Path

log = logging.getLogger(__name__)

TILES = frozenset(("amx_tile", "amx_int8", "amx_bf16"))
# arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) on x86-64: asm/prctl.h and asm/fpu/types.h of Linux.
_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def cpu_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the CPU features that the processors have and the kernel lets this process use, by the kernel's names."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    named = ("flags", "Features")  # the names of the line on x86-64 and on AArch64
    flags = [frozenset(line.partition(":")[2].split()) for line in lines if line.startswith(named)]
    features = frozenset.intersection(*flags) if flags else frozenset()
    return features if not features & TILES or tiles_allowed() else features - TILES


@lru_cache(maxsize=1)
def tiles_allowed() -> bool:
    """Ask the kernel for permission to use the AMX tile registers, and return whether it was granted.

    No thread of a process may use the registers before. Call it only on processors that have AMX: the system call's
    number is that of x86-64.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(_SYS_ARCH_PRCTL, c_long(_ARCH_REQ_XCOMP_PERM), c_long(_XFEATURE_XTILEDATA)) == 0:
        return True
    log.warning("this processor has AMX, but the kernel gives no tiles: %s", os.strerror(ctypes.get_errno()))
    return False
