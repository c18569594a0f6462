"""The cases of the Triton kernels, by kernel: CORE is what a dense Llama takes, ALL besides what other families do."""

from __future__ import annotations

import attention_cases
import gemm_cases
import more_cases
import triton_cases

CORE = {**triton_cases.KERNELS, **gemm_cases.KERNELS, **attention_cases.KERNELS}
ALL = {**CORE, **more_cases.KERNELS}
assert len(ALL) == sum(len(each) for each in (CORE, more_cases.KERNELS)), "two kernels of one name"
