"""The cases of the Triton kernels but those of sampling, by kernel; MORE are what other families than a dense Llama have."""

from __future__ import annotations

import attention_cases
import gemm_cases
import more_cases
import prefix_cases
import triton_cases

MORE = more_cases.KERNELS
PARTS = (triton_cases.KERNELS, gemm_cases.KERNELS, attention_cases.KERNELS, prefix_cases.KERNELS, MORE)
KERNELS = {name: made for part in PARTS for name, made in part.items()}
assert len(KERNELS) == sum(map(len, PARTS)), "two kernels of one name"
