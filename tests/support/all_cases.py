"""The cases of all Triton kernels except sampling, by kernel; MORE holds those of families other than a dense Llama."""

from __future__ import annotations

import attention_cases
import family_cases
import gemm_cases
import prefix_cases
import triton_cases

MORE = family_cases.KERNELS
PARTS = (triton_cases.KERNELS, gemm_cases.KERNELS, attention_cases.KERNELS, prefix_cases.KERNELS, MORE)
KERNELS = {name: made for part in PARTS for name, made in part.items()}
assert len(KERNELS) == sum(map(len, PARTS)), "two kernels of one name"
