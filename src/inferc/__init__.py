"""inferc: an ahead-of-time compiler and runtime for LLM inference.

`compile` makes an artifact of a model, `LLM` generates text with one, and `program` makes functions that do so in
steps. Names are imported at their first use, so `import inferc` is cheap and the runtime never loads the compiler.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from inferc.version import __version__

if TYPE_CHECKING:
    from inferc.compiler.build import compile
    from inferc.config import CompileConfig, EngineConfig
    from inferc.errors import (
        ArtifactError,
        ConfigError,
        ExportError,
        InfercError,
        RequestError,
        UnsupportedError,
        VerifyError,
    )
    from inferc.runtime.artifact.load import load_artifact as load
    from inferc.runtime.engine.beam_search import BeamSearchParams
    from inferc.runtime.engine.llm import LLM
    from inferc.runtime.engine.request_output import CompletionOutput, RequestOutput
    from inferc.runtime.programs.expressions import gen, select
    from inferc.runtime.programs.program import program
    from inferc.runtime.programs.vote import vote
    from inferc.runtime.step.sampling_params import SamplingParams
    from inferc.runtime.step.structured_outputs import StructuredOutputs

__all__ = [
    "LLM",
    "ArtifactError",
    "BeamSearchParams",
    "CompileConfig",
    "CompletionOutput",
    "ConfigError",
    "EngineConfig",
    "ExportError",
    "InfercError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "UnsupportedError",
    "VerifyError",
    "__version__",
    "compile",
    "gen",
    "load",
    "program",
    "select",
    "vote",
]

HOMES = {
    "compile": "compiler.build",
    "CompileConfig": "config",
    "EngineConfig": "config",
    "load": "runtime.artifact.load:load_artifact",
    "LLM": "runtime.engine.llm",
    "BeamSearchParams": "runtime.engine.beam_search",
    "CompletionOutput": "runtime.engine.request_output",
    "RequestOutput": "runtime.engine.request_output",
    "gen": "runtime.programs.expressions",
    "select": "runtime.programs.expressions",
    "program": "runtime.programs.program",
    "vote": "runtime.programs.vote",
    "SamplingParams": "runtime.step.sampling_params",
    "StructuredOutputs": "runtime.step.structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        # `from inferc import …` hides the words of an AttributeError.
        if name[:1].isupper() and name in (others := import_module("inferc.runtime.engine.absent").OF_PACKAGE):
            raise ImportError(f"inferc has no {name}: {others[name]}", name="inferc")
        raise AttributeError(f"module 'inferc' has no attribute {name!r}")
    module, _, attribute = HOMES.get(name, "errors").partition(":")
    return getattr(import_module(f"inferc.{module}"), attribute or name)


def __dir__() -> list[str]:
    return __all__
