"""The version of inferc: the one place that says it, read by pyproject.toml and by everything that is told of it."""

__version__ = "0.1.0"
