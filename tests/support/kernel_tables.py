"""The pass that chooses kernels, with the table of a target."""

from inferc.backends.lower import LowerConfig
from inferc.passes.lower.choose_kernels import ChooseKernels
from inferc.targets import Target


def choose_for(target: Target | str) -> ChooseKernels:
    """`ChooseKernels` as the target's own pipeline has it, where it has one table."""
    found = Target.parse(target) if isinstance(target, str) else target
    return ChooseKernels(found, LowerConfig(found).kernels)
