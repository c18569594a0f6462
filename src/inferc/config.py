"""The configs that a user may set: frozen dataclasses, checked when made, whose "auto"s are resolved to values once.

`CompileConfig.resolve` and `EngineConfig.resolve` return the resolved forms, which hold no "auto" and which every
other module takes. An artifact stores the resolved compile config. The runtime imports this module, so it imports
neither torch nor numpy.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from inferc.errors import ConfigError, UnsupportedError, nearest
from inferc.kv_groups import CacheGroup, CacheLimits, Eviction, pools_bytes, pools_for_all, share_out
from inferc.system.resources import available_cores, available_memory_bytes
from inferc.system.topology import cores_to_pin
from inferc.targets import DEFAULT_TARGET, Target, find_spec

log = logging.getLogger(__name__)

Auto = Literal["auto"]
DType = Literal["bfloat16", "float32", "float16"]
KVDType = Literal["bfloat16", "float32", "float16", "int8"]
Quantize = Literal["int8", "w8a8", "fp8", "int4", "int4-g32", "int4-g64", "int4-g128"]
Certify = Literal["auto", "full", "layers", "none"]
Isa = Literal["avx2", "avx512", "amx", "neon", "neon_bf16"]
GrammarBackend = Literal["xgrammar", "llguidance"]

# Values of options that name something real which is not built: they are refused by name and not as typos.
NOT_BUILT = {
    "quantize": re.compile(r"int4(-gptq|-awq)?(-g(32|64|128))?(-a16)?|mxfp4|nvfp4|auto"),
    "kv_dtype": re.compile(r"fp8"),
}
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # the form of a Hugging Face hub id
DEFAULT_BLOCK_SIZE = 32
MOST_ADAPTER_RANK = 256
SIZE_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}

ConfigT = TypeVar("ConfigT")


@dataclass(frozen=True)
class ContextLength:
    """The number of tokens in a sequence that a model was made for; None where its config does not say."""

    trained: int | None  # the length that the model was trained for, the default of max_model_len
    longest: int | None  # the length that its rope scaling reaches, at least `trained`


@dataclass(frozen=True)
class CompileConfig:
    """The options of a compile; lengths are in tokens."""

    # A name of TARGETS, with its chips where it needs some: cpu, onnx, tensorrt:sm_86, cuda:sm_90,sm_80.
    target: str = DEFAULT_TARGET
    dtype: DType | Auto = "auto"  # the dtype of activations and weights; auto: the checkpoint's
    quantize: Quantize | None = None  # the quantization scheme; None: weights stay in `dtype`
    kv_dtype: KVDType | Auto = "auto"  # the dtype of the KV cache; auto: `dtype`
    max_model_len: int | Auto = "auto"  # the longest sequence; auto: the length that the model was trained for
    block_size: int | Auto = "auto"  # the tokens of a KV cache block
    certify: Certify = "auto"  # auto: the program on its kinds of layers, the kernels on the whole model
    allow_drift: bool = False  # whether to write an artifact whose certificate is over its budget
    passes: tuple[Any, ...] = ()  # the user's passes: "module:name", "file.py:name" or, from Python, the object
    tp: int = 1  # tensor-parallel ranks, each with a part of every layer
    pp: int = 1  # pipeline-parallel stages, each with some of the layers
    ep: int = 1  # expert-parallel ranks, each with some of the experts
    expert_loads: str | None = None  # a file of how many tokens each expert got, by which experts are placed on ranks
    redundant_experts: int = 0  # how many of each layer's most loaded experts are on more than one rank
    adapter_rank: int = 0  # the largest rank of the LoRA adapters that steps have room for; 0: no adapters
    tool_format: str | None = None  # the name of the form of calls; None: as the chat template writes them
    reasoning_format: str | None = None  # that of reasoning

    def __post_init__(self) -> None:
        _check_fields(self)
        _check_positive(self, "max_model_len", "block_size", "tp", "pp", "ep")
        if self.redundant_experts and self.expert_loads is None:
            raise ConfigError(
                f"redundant_experts {self.redundant_experts}: a load profile says which experts to repeat;"
                " give --expert-loads FILE (recorded by `inferc eval --record-expert-loads FILE`)"
            )
        if self.block_size != "auto" and self.block_size % 16:
            raise ConfigError(f"block_size {self.block_size} is not a multiple of 16; use 16 or {DEFAULT_BLOCK_SIZE}")
        if not 0 <= self.adapter_rank <= MOST_ADAPTER_RANK:
            raise ConfigError(
                f"adapter_rank {self.adapter_rank}: expected 0, for no adapters, up to {MOST_ADAPTER_RANK}"
            )
        self._check_target(Target.parse(self.target))

    def _check_target(self, target: Target) -> None:
        """Raise UnsupportedError for options that the target does not take on any machine.

        The target's row in TARGETS alone decides.
        """
        for option, size in (("--tp", self.tp), ("--pp", self.pp), ("--ep", self.ep)):
            if size != 1 and not target.spec.ranks:
                raise target.refuse(option, size, ("1",), DEFAULT_TARGET)
            if size != 1 and self.adapter_rank:
                raise UnsupportedError(
                    f"--adapter-rank with {option} {size}: adapters are not split over ranks; leave one out"
                )
        if self.adapter_rank and not target.spec.adapters:
            raise target.refuse("--adapter-rank", self.adapter_rank, (), DEFAULT_TARGET)
        if self.quantize is not None:
            target.check("--quantize", self.quantize, "schemes")
        if self.kv_dtype != "auto":
            target.check("--kv-dtype", self.kv_dtype, "kv_dtypes")
        if self.dtype != "auto":
            target.check("--dtype", self.dtype, "dtypes")
        if self.block_size != "auto" and target.spec.kv == "dense":
            raise target.refuse("--block-size", self.block_size, (), DEFAULT_TARGET)

    def resolve(self, model_dtype: str, context: ContextLength) -> ResolvedCompileConfig:
        """Turn each "auto" but that of `certify` into a value for a model of this dtype and context; log the values."""
        spec = find_spec(self.target)
        own_dtype = spec.default_dtype or model_dtype
        if self.dtype == "auto" and own_dtype not in spec.dtypes:
            raise UnsupportedError(
                f"the checkpoint's dtype is {model_dtype}, which target {self.target} does not compute in;"
                " give --dtype float32 (keeps every bit) or --dtype bfloat16 (half the memory)"
            )
        dtype: Any = own_dtype if self.dtype == "auto" else self.dtype
        kv_dtype = dtype if self.kv_dtype == "auto" else self.kv_dtype
        if kv_dtype not in (dtype, "int8"):
            raise UnsupportedError(
                f"kv_dtype {kv_dtype} differs from dtype {dtype}, which is not built; leave it out or use int8"
            )
        max_model_len = self._resolve_length(context)
        block_size = DEFAULT_BLOCK_SIZE if self.block_size == "auto" else self.block_size
        resolved = ResolvedCompileConfig(
            target=self.target,
            dtype=dtype,
            quantize=self.quantize,
            kv_dtype=kv_dtype,
            max_model_len=max_model_len,
            block_size=spec.dense_row(max_model_len) if spec.kv == "dense" else block_size,
            certify=self.certify,
            allow_drift=self.allow_drift,
            passes=tuple(os.path.basename(pass_spec(each)) for each in self.passes),  # no paths in an artifact
            tp=self.tp,
            pp=self.pp,
            ep=self.ep,
            redundant_experts=self.redundant_experts,
            adapter_rank=self.adapter_rank,
        )
        log.info("compile config: %s", ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(resolved).items()))
        return resolved

    def _resolve_length(self, context: ContextLength) -> int:
        if self.max_model_len == "auto":
            if context.trained is None:
                raise ConfigError(
                    "the model's config does not say how long a sequence may be (it has no max_position_embeddings);"
                    " give --max-model-len"
                )
            return context.trained
        if context.longest is not None and self.max_model_len > context.longest:
            scaled = "" if context.longest == context.trained else " with its rope scaling"
            raise ConfigError(
                f"max_model_len {self.max_model_len} is more than the {context.longest} positions the model was made"
                f" for{scaled}; use at most {context.longest}"
            )
        return self.max_model_len


@dataclass(frozen=True)
class ResolvedCompileConfig:
    """The resolved form of a `CompileConfig`, without an "auto"."""

    target: str
    dtype: DType
    quantize: Quantize | None
    kv_dtype: KVDType
    max_model_len: int
    block_size: int
    certify: Certify
    allow_drift: bool
    passes: tuple[str, ...]
    tp: int
    pp: int
    ep: int
    redundant_experts: int
    adapter_rank: int


DraftMethod: TypeAlias = Literal["none", "ngram", "draft", "eagle3", "mtp"]
MOST_DRAFTED = 63  # tokens of a sequence in a step
MOST_BRANCHES = 16  # tokens that are tried for one place


@dataclass(frozen=True)
class Speculate:
    """The choice of what drafts tokens: nothing, what followed the last tokens before, a smaller model, or a head.

    path: the artifact of the smaller model or of the head; empty for the other methods, and for MTP layers, which are
    in the model's own artifact. is_shared: what followed is looked for in the answers of earlier requests, too.
    """

    method: DraftMethod = "none"
    path: str = ""
    is_shared: bool = False

    @property
    def has_runner(self) -> bool:
        """Return whether what drafts is compiled, and runs steps of its own."""
        return self.method in ("draft", "eagle3", "mtp")

    @staticmethod
    def parse(text: str) -> Speculate:
        """Parse `none`, `ngram[:shared]`, `mtp`, `draft:PATH` or `eagle3:PATH`; raise ConfigError for other texts."""
        method, _, path = text.partition(":")
        if method in ("draft", "eagle3") and path:
            return Speculate(method, path)  # type: ignore[arg-type]
        if text in ("none", "ngram", "mtp"):
            return Speculate(text)  # type: ignore[arg-type]
        if text == "ngram:shared":
            return Speculate("ngram", is_shared=True)
        why = f": {method} is not built yet" if method in ("eagle", "medusa") else ""
        why = ": suffix decoding is ngram:shared here" if method == "suffix" else why
        raise ConfigError(
            f"speculate is {text!r}{why}, expected none, ngram, ngram:shared, mtp, draft:PATH or eagle3:PATH"
        )


@dataclass(frozen=True)
class EngineConfig:
    """The options of running an artifact."""

    num_threads: int | Auto = "auto"  # auto: the cores that this process may use
    isa: Isa | Auto = "auto"  # the instruction set; auto: the best that both this machine and the artifact have
    max_num_seqs: int = 64  # the most sequences of a step
    max_num_batched_tokens: int | Auto = "auto"  # the token budget of a step; auto: the default of its target
    kv_memory_bytes: int | Auto = "auto"  # auto: what max_num_seqs full sequences need, at most half the free memory
    prefix_cache: bool = True  # whether computed KV blocks are kept for sequences that begin with the same tokens
    kv_disk: str | None = None  # a folder for KV blocks that do not fit in the KV memory, kept for the next run
    kv_disk_bytes: int | Auto = "auto"  # auto: DEFAULT_BYTES of offload/disk.py, at most half of the free disk space
    kv_evict: str | None = None  # the tokens that a sequence keeps in the KV cache, see kv_groups.Eviction; None: all
    policy: str = "fcfs"  # the order of waiting sequences, see inferc.runtime.scheduler.policies
    overcommit: bool = False  # admit sequences that fit now, even if blocks are expected to run out later
    tbt_ms: float | None = None  # the longest time of a step, in milliseconds, while a sequence decodes
    deterministic: bool = False  # compute equal bits in any batch; cpu always does, onnxruntime and TensorRT never
    pin_threads: bool = False  # pin each thread to a core of its own, for a machine on which nothing else runs
    kv_events: bool = False  # collect events of the blocks that the prefix cache stores and evicts
    speculate: str = "none"  # what drafts tokens: see Speculate
    speculate_tokens: int = 15  # the most tokens that are drafted of a sequence in a step
    speculate_branches: int = 1  # the most tokens that are tried for one place; 1: drafts are chains
    adapters: tuple[str, ...] = ()  # LoRA adapters to load at the start, each "NAME=PATH"
    structured_outputs_backend: GrammarBackend | Auto = "auto"  # holds answers to forms; auto: the first installed
    tool_format: str | None = None  # the name of the form of calls; None: that of the artifact
    reasoning_format: str | None = None  # that of reasoning
    record: str | None = None  # a file that every request is written to, for `inferc replay`
    tap: tuple[str, ...] = ()  # names of values to keep for requests that ask for it; `*` stands for anything
    tap_out: str | None = None  # a folder for tapped values, one file per request; None: `LLM.tapped` returns them
    trusted_keys: str | None = None  # a file of public keys; an artifact that none of them signed is not loaded

    def __post_init__(self) -> None:
        object.__setattr__(self, "tap", tuple(self.tap))  # a config read from JSON has a list
        object.__setattr__(self, "adapters", tuple(self.adapters))
        if self.tap_out is not None and not self.tap:
            raise ConfigError(f"tap_out {self.tap_out} without a tap: say with --tap NAME which values are to be kept")
        _check_fields(self)
        _check_positive(
            self, "num_threads", "max_num_seqs", "max_num_batched_tokens", "kv_memory_bytes", "kv_disk_bytes"
        )
        if self.kv_evict is not None:
            Eviction.parse(self.kv_evict)
        Speculate.parse(self.speculate)
        if not 0 < self.speculate_tokens <= MOST_DRAFTED:
            raise ConfigError(f"speculate_tokens is {self.speculate_tokens}, expected 1 to {MOST_DRAFTED}")
        if not 0 < self.speculate_branches <= MOST_BRANCHES:
            raise ConfigError(f"speculate_branches is {self.speculate_branches}, expected 1 to {MOST_BRANCHES}")
        if self.speculate_branches > 1 and Speculate.parse(self.speculate).method in ("none", "ngram"):
            raise ConfigError(
                f"speculate_branches is {self.speculate_branches}, and --speculate {self.speculate} knows one token for"
                " each place; leave it out, or have a smaller model or a head draft (--speculate draft:PATH)"
            )
        if self.tbt_ms is not None and not 0.0 < self.tbt_ms < math.inf:
            raise ConfigError(f"tbt_ms is {self.tbt_ms:g}, expected a number of milliseconds above 0")
        if self.max_num_batched_tokens != "auto" and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}:"
                " a step could not give every sequence a token; raise the one or lower the other"
            )

    def token_budget(self, target: str = DEFAULT_TARGET) -> int:
        """Return the most tokens of a step on a target."""
        if self.max_num_batched_tokens == "auto":
            return max(find_spec(target).token_budget, self.max_num_seqs)
        return self.max_num_batched_tokens

    def resolve(
        self,
        max_model_len: int,
        block_size: int,
        groups: Sequence[CacheGroup],
        kv_available_bytes: int | None = None,
        target: str = DEFAULT_TARGET,
    ) -> ResolvedEngineConfig:
        """Turn every "auto" but the ISA's into a value for this machine and an artifact's KV cache, and log the values.

        kv_available_bytes: the memory that the KV cache may take; None: half of the memory that is free on the host.

        The KV memory comes out as whole blocks. Each group has one block more than its sequences need: block 0,
        reserved for padding.
        """
        token_budget = self.token_budget(target)
        limits = CacheLimits(block_size, max_model_len, self.max_num_seqs, token_budget)
        if self.kv_memory_bytes == "auto":
            needed = pools_bytes(groups, limits, pools_for_all(groups, limits))
            available = available_memory_bytes() // 2 if kv_available_bytes is None else kv_available_bytes
            kv_bytes = min(needed, available)
        else:
            kv_bytes = self.kv_memory_bytes
        num_blocks = share_out(groups, limits, kv_bytes)
        num_threads = available_cores() if self.num_threads == "auto" else self.num_threads
        if self.pin_threads:
            cores_to_pin(num_threads)
        resolved = ResolvedEngineConfig(
            num_threads=num_threads,
            isa=self.isa,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=token_budget,
            kv_memory_bytes=pools_bytes(groups, limits, num_blocks),
            num_blocks=num_blocks,
            prefix_cache=self.prefix_cache,
            deterministic=self.deterministic,
            pin_threads=self.pin_threads,
        )
        log.info("engine config: %s", ", ".join(f"{k}={v}" for k, v in dataclasses.asdict(resolved).items()))
        return resolved


@dataclass(frozen=True)
class ResolvedEngineConfig:
    """The resolved form of an `EngineConfig`, in which only the ISA may be "auto".

    The CPU runner chooses the ISA when it opens a library.
    """

    num_threads: int
    isa: Isa | Auto
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_memory_bytes: int
    num_blocks: tuple[int, ...]  # the number of blocks in each KV group's pool, block 0 included
    prefix_cache: bool
    deterministic: bool
    pin_threads: bool


def from_dict(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Make a config from plain data; raise ConfigError for an unknown key, naming the nearest key that exists."""
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for key in values:
        if key not in known:
            raise ConfigError(f"{kind.__name__} has no option {key!r}; {nearest(key, known)}")
    return kind(**values)


def pass_spec(each: Any) -> str:
    """Return how an artifact records a user's pass: the name that was given, or an object's module and own name."""
    return each if isinstance(each, str) else f"{type(each).__module__}:{getattr(each, 'name', type(each).__name__)}"


def parse_bytes(text: str) -> int:
    """Parse a size such as `"2GiB"`, `"512 MB"`, `"1.5g"` or `"1048576"` to a number of bytes.

    Ki, Mi, Gi and Ti are powers of 1024. Raises ConfigError for what is no size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?\s*", text, re.IGNORECASE)
    if match is None:
        raise ConfigError(f"{text!r} is not a size; write for example 512MiB, 2GiB or a number of bytes")
    return int(float(match[1]) * SIZE_UNITS[(match[2] or "").lower()])


def _check_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value != "auto" and value < 1:
            raise ConfigError(f"{name} is {value}, expected at least 1")


def _check_fields(config: Any) -> None:
    """Raise ConfigError unless every field holds a value that its annotation allows."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        words, kinds = _choices(hint)
        if isinstance(value, str):
            if value in words or str in kinds:
                continue
            if name in NOT_BUILT and NOT_BUILT[name].fullmatch(value):
                raise UnsupportedError(f"{name} {value!r} is not built yet; available: {_listed(words, kinds)}")
        elif type(value) in kinds or (type(value) is int and float in kinds):
            continue
        raise ConfigError(f"{name} is {value!r}, expected {_listed(words, kinds)}")


def _choices(hint: Any) -> tuple[list[str], list[type]]:
    """Return the words and the plain types that an annotation allows."""
    if get_origin(hint) is Literal:
        return list(get_args(hint)), []
    if not get_args(hint) or get_origin(hint) is tuple:
        return [], [get_origin(hint) or hint]
    parts = [_choices(part) for part in get_args(hint)]
    return [word for part in parts for word in part[0]], [kind for part in parts for kind in part[1]]


def _listed(words: list[str], kinds: list[type]) -> str:
    names = {
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        type(None): "leaving it out",
        tuple: "a tuple",
    }
    return " or ".join([*words, *(names.get(kind, kind.__name__) for kind in kinds)])
