"""A target of one folder: its steps compute nothing, and every logit is that of token 0."""

from inferc.targets import TargetSpec

NULL = TargetSpec(
    "null",
    runs_on="nothing",
    backend="null_target.backend:NullBackend",
    runner="null_target.runner:NULL_RUNNER",
)
