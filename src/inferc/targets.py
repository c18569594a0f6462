"""The table of targets: one row per target says what it takes and can do.

No other module of the package tests a target's name. A row names the two places that know the target: its backend,
which compiles for it, and its runner factory, which runs what was compiled. A target from outside is one more row
(docs/architecture.md, "A target"). The runtime imports this module, so it imports neither torch nor numpy.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inferc.errors import ConfigError, UnsupportedError
from inferc.manifest_types import Determinism

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The NVIDIA chips that kernels are compiled for."""

DEFAULT_TARGET = "cpu"

INTEGERS = ("int8", "w8a8", "int4", "int4-g32", "int4-g64", "int4-g128")
MODEL_DTYPES = ("bfloat16", "float32")
ALL_DTYPES = ("bfloat16", "float32", "float16")

OF_OWN_KERNELS = Determinism(
    contract="a row's bits depend on its own sequence only: not on threads, batch, chunking or preemption",
    scope="one instruction set; another may differ in rounding",
)
OF_ONNXRUNTIME = Determinism(
    contract="none: a row's last bits may depend on how many rows are computed with it",
    scope="onnxruntime's kernels, of whatever version and provider runs the model",
)
OF_TENSORRT = Determinism(
    contract="none: a row's last bits may depend on how many rows are computed with it",
    scope="one chip, and one version of TensorRT",
)


@dataclass(frozen=True)
class TargetSpec:
    """The row of one target: which options of a compile it takes, and how its steps run.

    `name` is the name in `--target`, without chips.
    """

    name: str
    runs_on: str
    """The name, in messages, of what computes the target's steps."""
    backend: str
    """The module:name of its `Backend` (inferc.backends.backend)."""
    runner: str
    """The module:name of its `RunnerFactory` (inferc.runtime.runners.api)."""
    extra: str = ""
    """The extra of pyproject.toml that it needs."""
    packages: tuple[str, ...] = ()
    """The modules of that extra that compiling imports."""
    archs: Literal["none", "one", "many"] = "none"
    """The number of chips that follow the target's name."""
    known_archs: tuple[str, ...] = ()
    """The chips that there is code for; empty: any name of the form of a chip."""
    kv: Literal["paged", "dense"] = "paged"
    """The layout of the KV cache: in blocks, or one row per sequence."""
    kv_row_multiple: int = 1
    """The number of tokens that the length of a dense row is a multiple of."""
    dtypes: tuple[str, ...] = MODEL_DTYPES
    default_dtype: str | None = None
    """The dtype where the user gives none; None: the checkpoint's."""
    schemes: tuple[str, ...] = INTEGERS
    schemes_of_chips: Mapping[str, int] = field(default_factory=dict, hash=False)
    """For each quantization scheme that not every chip computes, the number of the first chip that does."""
    kv_dtypes: tuple[str, ...] = (*MODEL_DTYPES, "int8")
    adapters: bool = False
    """True if steps may have room for LoRA adapters, by --adapter-rank."""
    ranks: bool = False
    """True if --tp, --pp and --ep can spread a model over several ranks."""
    deterministic: Literal["always", "on_request", "never"] = "always"
    """When the bits of a row depend on its own sequence alone: always, if `--deterministic` asks for it, or never."""
    determinism: Determinism = OF_OWN_KERNELS
    """The order of addition of its kernels in words, as the manifest says it."""
    token_budget: int = 512
    """The default of the most tokens of a step."""
    kernels_certified: Literal["compile", "verify", "never"] = "never"
    """When its kernels get their row of the certificate: at compile time, by `inferc verify` on the machine that runs
    them, or never."""
    kernels_round_rows: bool = False
    """True if the kernels of the target round rows that a quantized program keeps in floats."""
    is_oracle: bool = False
    """True if the target serves only to judge other targets by."""
    more_targets: bool = False
    """True if `--add-target` can add chips to an artifact."""
    heads: bool = False
    """True if it runs heads that draft (`--head-of`), which read rows of another model."""
    mtp: bool = False
    """True if it runs the MTP layers of a model (`--mtp`), which read the rows behind its last norm."""

    def dense_row(self, max_model_len: int) -> int:
        """Return the number of tokens that a sequence's row of a dense KV cache has room for."""
        return -(-max_model_len // self.kv_row_multiple) * self.kv_row_multiple

    def find_backend(self) -> Any:
        """Import and return the backend class, with what compiling for the target needs."""
        return _find(self.backend)

    def find_runner(self) -> Any:
        """Import and return the runner factory, with what running the target's steps needs."""
        return _find(self.runner)


TARGETS: tuple[TargetSpec, ...] = (
    TargetSpec(
        "cpu",
        runs_on="this machine's processor",
        backend="inferc.backends.cpu:CpuBackend",
        runner="inferc.runtime.runners.cpu.factory:CPU",
        adapters=True,
        ranks=True,
        kernels_certified="compile",
        heads=True,
        mtp=True,
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
        adapters=True,
        deterministic="on_request",
        token_budget=8192,
        more_targets=True,
        heads=True,
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
        determinism=OF_ONNXRUNTIME,
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
        determinism=OF_ONNXRUNTIME,
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
        determinism=OF_ONNXRUNTIME,
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
        determinism=OF_TENSORRT,
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
        determinism=OF_TENSORRT,
        token_budget=8192,
    ),
    TargetSpec(
        "reference",
        runs_on="the ops' references",
        backend="inferc.backends.reference:ReferenceBackend",
        runner="inferc.runtime.runners.reference:REFERENCE",
        schemes=(*INTEGERS, "fp8"),
        adapters=True,
        ranks=True,
        is_oracle=True,
        heads=True,
        mtp=True,
    ),
)


@dataclass(frozen=True)
class Target:
    """The target that an artifact is compiled for: a row of TARGETS, and the chips that are named."""

    spec: TargetSpec
    archs: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> Target:
        """Parse a target in the command line's form: `cpu`, `onnx:cuda`, `cuda:sm_90,sm_80`, `tensorrt:sm_86`.

        Raises ConfigError for what is no target, UnsupportedError for a chip that there is no code for.
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
        """Return the form that `parse` takes."""
        return f"{self.spec.name}:{','.join(self.archs)}" if self.archs else self.spec.name

    @property
    def device(self) -> str:
        """The kind of target, without chips and variants: `cpu`, `cuda`, `onnx` and so on."""
        return self.spec.name.partition(":")[0]

    @property
    def schemes(self) -> tuple[str, ...]:
        """The quantization schemes that all of the target's chips compute."""
        first = self.spec.schemes_of_chips
        oldest = min((int(arch.removeprefix("sm_")) for arch in self.archs), default=0)
        return tuple(scheme for scheme in self.spec.schemes if oldest >= first.get(scheme, 0))

    @property
    def each(self) -> tuple[str, ...]:
        """The names of the target with one chip each, as the manifest lists them: `cuda:sm_90`, `cuda:sm_80`."""
        return tuple(f"{self.spec.name}:{arch}" for arch in self.archs) or (self.spec.name,)

    def check(self, option: str, value: str, kind: Literal["dtypes", "schemes", "kv_dtypes"]) -> None:
        """Raise UnsupportedError unless the target takes this value of an option."""
        takes = self.schemes if kind == "schemes" else getattr(self.spec, kind)
        if value not in takes:
            raise self.refuse(option, value, takes, self._other_for(value, kind))

    def _other_for(self, value: str, kind: str) -> str | None:
        """Return another target that takes a value, or None.

        A target on the same chips comes first, then one that needs no chip, then a newer chip.
        """
        fits = [spec for spec in TARGETS if value in getattr(spec, kind) and not spec.is_oracle]
        near = [spec for spec in fits if spec.runs_on == self.spec.runs_on and spec.archs != "none"]
        newer = [f"{spec.name}:sm_{spec.schemes_of_chips[value]}" for spec in fits if value in spec.schemes_of_chips]
        same_chips = [str(Target(spec, self.archs)) for spec in near if value not in spec.schemes_of_chips]
        return next(iter([*same_chips, *(spec.name for spec in fits if spec.archs == "none"), *newer]), None)

    def refuse(
        self, option: str, value: object, takes: tuple[str, ...], instead: str | None = None
    ) -> UnsupportedError:
        """Return the error that refuses an option's value: what was found, what the target takes, and what to do.

        All such refusals have this form. takes: the values that the target takes, possibly none; instead: another
        target that takes the value.
        """
        found = f"{option} {value}" if str(value) else option
        does = f"it takes {', '.join(takes)}" if takes else "it does not take it"
        other = f", or use --target {instead}" if instead else ""
        return UnsupportedError(f"target {self}: {found}: {does}; leave it out{other}")


def find_spec(text: str) -> TargetSpec:
    """Return the row of a target as a manifest or a user names it, with its chips.

    Raises ConfigError for an unknown name.
    """
    return _split(text)[0]


def _split(text: str) -> tuple[TargetSpec, str]:
    """Return the row that a text names, and the text of the chips after it."""
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
