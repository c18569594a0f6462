"""The targets, a row each: what each takes and can do. Nothing else in the package asks for a target's name.

A row names the two places that know the target: its backend, which compiles for it, and its runner factory, which runs what was
compiled. A target from outside is a row more (docs/architecture.md, "A target"). The runtime imports this module, so it imports
neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inferc.errors import ConfigError, UnsupportedError

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The chips of NVIDIA that kernels are compiled for."""

DEFAULT_TARGET = "cpu"

INTEGERS = ("int8", "w8a8", "int4", "int4-g32", "int4-g64", "int4-g128")
MODEL_DTYPES = ("bfloat16", "float32")
ALL_DTYPES = ("bfloat16", "float32", "float16")


@dataclass(frozen=True)
class TargetSpec:
    """What one target takes of a compile, and what its steps are. `name` is that of `--target`, without chips."""

    name: str
    runs_on: str
    """What computes its steps, in the words of messages."""
    backend: str
    """module:name of its `Backend` (inferc.backends.backend)."""
    runner: str
    """module:name of its `RunnerFactory` (inferc.runtime.runners.api)."""
    extra: str = ""
    """The extra of pyproject.toml that it needs."""
    packages: tuple[str, ...] = ()
    """The modules of that extra which compiling imports."""
    archs: Literal["none", "one", "many"] = "none"
    """How many chips are named behind it."""
    known_archs: tuple[str, ...] = ()
    """The chips there is code for; none: whatever has the form of one."""
    kv: Literal["paged", "dense"] = "paged"
    """How K and V lie: in blocks of the KV cache, or a row of it for each sequence."""
    kv_row_multiple: int = 1
    """A dense row holds a multiple of so many tokens."""
    dtypes: tuple[str, ...] = MODEL_DTYPES
    default_dtype: str | None = None
    """Taken where none is asked for; None: the checkpoint's."""
    schemes: tuple[str, ...] = INTEGERS
    schemes_of_chips: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Of schemes that not every chip computes: the number of the first chip that does."""
    kv_dtypes: tuple[str, ...] = (*MODEL_DTYPES, "int8")
    ranks: bool = False
    """Whether --tp, --pp and --ep spread a model over several."""
    deterministic: Literal["always", "on_request", "never"] = "always"
    """Whether the bits of a row depend on its own sequence alone."""
    token_budget: int = 512
    """Tokens of a step at most, unless asked for otherwise."""
    kernels_certified: Literal["compile", "verify", "never"] = "never"
    """Where its kernels get their row of the certificate: as the model is compiled, by `inferc verify` on its machine, or not yet."""
    kernels_round_rows: bool = False
    """Whether its kernels round rows that a quantized program has in floats."""
    is_oracle: bool = False
    """Whether it is there to judge others by, and not to serve."""
    more_targets: bool = False
    """Whether `--add-target` adds chips to an artifact."""

    def dense_row(self, max_model_len: int) -> int:
        """The tokens that a sequence's row of a dense cache has room for."""
        return -(-max_model_len // self.kv_row_multiple) * self.kv_row_multiple

    def find_backend(self) -> Any:
        """The backend class; imports what compiling for the target takes."""
        return _find(self.backend)

    def find_runner(self) -> Any:
        """The runner factory; imports what running its steps takes."""
        return _find(self.runner)


TARGETS: tuple[TargetSpec, ...] = (
    TargetSpec(
        "cpu",
        runs_on="this machine's processor",
        backend="inferc.backends.cpu:CpuBackend",
        runner="inferc.runtime.runners.cpu.factory:CPU",
        ranks=True,
        kernels_certified="compile",
    ),
    TargetSpec(
        "cuda",
        runs_on="a GPU",
        backend="inferc.backends.cuda:CudaBackend",
        runner="inferc.runtime.runners.cuda.factory:CUDA",
        extra="cuda",
        packages=("triton",),
        archs="many",
        known_archs=ARCHS,
        schemes=("int8",),
        deterministic="on_request",
        token_budget=8192,
        more_targets=True,
    ),
    TargetSpec(
        "onnx",
        runs_on="onnxruntime",
        backend="inferc.backends.onnx:OnnxBackend",
        runner="inferc.runtime.runners.dense.factory:ONNX",
        extra="onnx",
        packages=("onnx", "onnx_ir", "onnxruntime"),
        kv="dense",
        dtypes=("float32", "float16"),
        default_dtype="float32",  # onnxruntime has few kernels for bfloat16 on a CPU
        kv_dtypes=("float32", "float16"),
        deterministic="never",
        kernels_certified="compile",
        kernels_round_rows=True,
    ),
    TargetSpec(
        "onnx:standard",
        runs_on="onnxruntime",
        backend="inferc.backends.onnx:StandardOnnxBackend",
        runner="inferc.runtime.runners.dense.factory:ONNX",
        extra="onnx",
        packages=("onnx", "onnx_ir", "onnxruntime"),
        kv="dense",
        dtypes=("float32", "float16"),
        default_dtype="float32",
        kv_dtypes=("float32", "float16"),
        deterministic="never",
        kernels_certified="compile",
    ),
    TargetSpec(
        "onnx:cuda",
        runs_on="onnxruntime",
        backend="inferc.backends.onnx:CudaOnnxBackend",
        runner="inferc.runtime.runners.dense.factory:ONNX_CUDA",
        extra="onnx-gpu",
        packages=("onnx", "onnx_ir", "onnxruntime"),
        kv="dense",
        kv_row_multiple=128,  # rows begin at multiples of 256 bytes
        dtypes=("float16",),  # onnxruntime has no attention in float32 on a GPU
        default_dtype="float16",
        schemes=tuple(scheme for scheme in INTEGERS if scheme != "w8a8"),
        kv_dtypes=("float16",),
        deterministic="never",
        kernels_certified="verify",
    ),
    TargetSpec(
        "tensorrt",
        runs_on="TensorRT",
        backend="inferc.backends.tensorrt:TensorRTBackend",
        runner="inferc.runtime.runners.dense.factory:TENSORRT",
        extra="tensorrt",
        archs="one",
        kv="dense",
        kv_row_multiple=128,
        dtypes=ALL_DTYPES,
        schemes=("int8", "w8a8", "fp8"),
        schemes_of_chips={"fp8": 89},
        kv_dtypes=ALL_DTYPES,
        deterministic="never",
        kernels_certified="verify",
    ),
    TargetSpec(
        "tensorrt-paged",
        runs_on="TensorRT",
        backend="inferc.backends.tensorrt_paged:PagedTensorRTBackend",
        runner="inferc.runtime.runners.cuda.factory:TENSORRT_PAGED",
        extra="cuda",
        packages=("triton",),
        archs="one",
        known_archs=ARCHS,
        schemes=("int8", "w8a8", "fp8"),
        schemes_of_chips={"fp8": 89},
        deterministic="never",
        token_budget=8192,
    ),
    TargetSpec(
        "reference",
        runs_on="the ops' references",
        backend="inferc.backends.reference:ReferenceBackend",
        runner="inferc.runtime.runners.reference:REFERENCE",
        schemes=(*INTEGERS, "fp8"),
        ranks=True,
        is_oracle=True,
    ),
)


@dataclass(frozen=True)
class Target:
    """What an artifact is compiled for: a row of TARGETS, and the chips of it that are named."""

    spec: TargetSpec
    archs: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Target:
        """From the command line's form: `cpu`, `onnx:cuda`, `cuda:sm_90,sm_80`, `tensorrt:sm_86`.

        Raises ConfigError for what is none, UnsupportedError for a chip that there is no code for.
        """
        spec, named = _split(text)
        if spec.archs == "none":
            return Target(spec)
        if spec.archs == "one" and not re.fullmatch(r"sm_\d{2,3}", named):
            raise ConfigError(f"target {text!r}: a plan is for one chip; write for example {spec.name}:sm_86")
        archs = tuple(arch for arch in named.split(",") if arch)
        if not archs:
            known = ", ".join(spec.known_archs)
            raise ConfigError(f"target {text!r} names no chip; write for example {spec.name}:sm_90 (known: {known})")
        for arch in archs:
            if spec.known_archs and arch not in spec.known_archs:
                known = ", ".join(spec.known_archs)
                raise UnsupportedError(f"target {text!r}: no kernels for {arch}; known: {known}")
        if len(set(archs)) < len(archs):
            raise ConfigError(f"target {text!r} names a chip twice")
        return Target(spec, archs)

    def __str__(self) -> str:
        """The form that `parse` takes."""
        return f"{self.spec.name}:{','.join(self.archs)}" if self.archs else self.spec.name

    @property
    def device(self) -> str:
        """The kind of target, without chips and variants: `cpu`, `cuda`, `onnx`, …"""
        return self.spec.name.partition(":")[0]

    @property
    def schemes(self) -> tuple[str, ...]:
        """The schemes of quantization that all of its chips compute."""
        first = self.spec.schemes_of_chips
        oldest = min((int(arch.removeprefix("sm_")) for arch in self.archs), default=0)
        return tuple(scheme for scheme in self.spec.schemes if oldest >= first.get(scheme, 0))

    @property
    def each(self) -> tuple[str, ...]:
        """One name a chip, as the manifest has them: `cuda:sm_90`, `cuda:sm_80`."""
        return tuple(f"{self.spec.name}:{arch}" for arch in self.archs) or (self.spec.name,)

    def check(self, option: str, value: str, kind: Literal["dtypes", "schemes", "kv_dtypes"]) -> None:
        """Raise UnsupportedError unless the target takes this value of an option."""
        takes = self.schemes if kind == "schemes" else getattr(self.spec, kind)
        if value not in takes:
            raise self.refuse(option, value, takes, self._other_for(value, kind))

    def _other_for(self, value: str, kind: str) -> str | None:
        """Another target that takes a value: a newer chip of this one, one on the same chips, or one that needs none."""
        fits = [spec for spec in TARGETS if value in getattr(spec, kind) and not spec.is_oracle]
        near = [spec for spec in fits if spec.runs_on == self.spec.runs_on and spec.archs != "none"]
        newer = [f"{spec.name}:sm_{spec.schemes_of_chips[value]}" for spec in fits if value in spec.schemes_of_chips]
        same_chips = [str(Target(spec, self.archs)) for spec in near if value not in spec.schemes_of_chips]
        return next(iter([*same_chips, *(spec.name for spec in fits if spec.archs == "none"), *newer]), None)

    def refuse(
        self, option: str, value: object, takes: tuple[str, ...], instead: str | None = None
    ) -> UnsupportedError:
        """The refusal of an option's value: what was found, what the target takes, and what to do. All have this form.

        takes: the values that it takes, none of which may be left; instead: another target that takes the value.
        """
        found = f"{option} {value}" if str(value) else option
        does = f"it takes {', '.join(takes)}" if takes else "it does not take it"
        other = f", or use --target {instead}" if instead else ""
        return UnsupportedError(f"target {self}: {found}: {does}; leave it out{other}")


def find_spec(text: str) -> TargetSpec:
    """The row of a target as a manifest or a user names it, chips and all. Raises ConfigError for a name of none."""
    return _split(text)[0]


def _split(text: str) -> tuple[TargetSpec, str]:
    """The row that a text names, and the chips behind it."""
    rows = {spec.name: spec for spec in TARGETS}
    if text in rows:
        return rows[text], ""
    name, _, named = text.partition(":")
    if name not in rows:
        plain = [each for each in rows if ":" not in each]
        raise ConfigError(f"unknown target {text!r}; expected one of {', '.join(plain)} (cuda as cuda:sm_90)")
    if rows[name].archs == "none":
        forms = [each for each in rows if each.partition(":")[0] == name]
        listed = f"{', '.join(forms[:-1])} or {forms[-1]}" if len(forms) > 1 else name
        raise ConfigError(f"target {text!r}: {name} takes no architecture; write {listed}")
    return rows[name], named


def _find(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
