"""The version of inferc, stated here only and read by pyproject.toml and all other code."""

__version__ = "0.1.0"
