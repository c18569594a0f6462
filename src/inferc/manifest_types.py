"""The types of engine.json, program.json and records.json, which their writer fills and their reader checks.

A digest that matches says that a file is as it was written, not that it was written well. So the files are checked
against these types before anything is taken from them; a field that is missing or of another type is reported by its
place (`$.programs[0].tp_rank`). A field that may be missing may also be null; other fields may be anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from inferc.arena import MemoryFormula, MemoryPlan, Pool
from inferc.manifest import Head
from inferc.system.json_text import parse_json

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Positive = Annotated[int, Meta(ge=1, le=1 << 53)]
Small = Annotated[int, Meta(ge=0, le=1 << 20)]  # an index or count by which tables in memory are sized
Sha256 = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
Xxh3 = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
Shape = Annotated[list[Count | str], Meta(min_length=1)]  # a size that depends on the step is a name
RowKind: TypeAlias = Literal["tokens", "rows", "seqs"]  # what a kernel has a row for
PoolingKind: TypeAlias = Literal["first", "last", "mean"]
Type = TypeVar("Type")


class FileEntry(Struct, frozen=True, omit_defaults=True):
    """A file of the artifact: a file read whole has a SHA-256, a mapped file has the digests of its chunks."""

    bytes: Count
    sha256: Sha256 | None = None
    xxh3_128: list[Xxh3] | None = None

    def holds_weights(self, name: str) -> bool:
        """Return whether the file, whose name is `name`, holds weights: plans of segments are mapped too."""
        return self.xxh3_128 is not None and not name.startswith("tensorrt/segment-")


class Pooling(Struct, frozen=True):
    kind: PoolingKind
    normalize: bool


class Quantization(Struct, frozen=True):
    scheme: str
    products: Count
    kept: dict[str, Count]


class Model(Struct, frozen=True, omit_defaults=True, kw_only=True):
    model_type: str
    architecture: str
    vocab_size: Positive
    hidden_size: Positive
    num_attention_layers: Count
    max_position_embeddings: Count
    max_model_len: Any
    dtype: str
    num_parameters: Count
    tied_embeddings: Any
    rope: Any
    ignored_tensors: Any
    quantization: Quantization | None = None
    bos_token_id: Any
    eos_token_ids: list[int]
    generation: dict[str, Any]
    pooling: Pooling | None
    hf_config: dict[str, Any]
    head: Head | None = None  # for a head that drafts: it is no model of its own


class KvGroup(Struct, frozen=True):
    kind: Literal["full", "window", "chunk", "latent"]
    layers: Annotated[list[Small], Meta(min_length=1)]
    num_kv_heads: Positive
    head_dim: Positive
    window: Count
    dtype: Literal["bfloat16", "float16", "float32", "int8"]
    bytes_per_token: Positive


class Memory(Struct, frozen=True):
    arena: MemoryFormula
    kv_bytes_per_token: Count


class KvLayout(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The layout of a block of K and V in memory: an order, and for the cpu target the units that its kernels read."""

    block_size: Count | None = None
    k: str | None = None
    v: str | None = None
    latent: str | None = None
    order: str
    units: list[Count] | None = None
    scales: str | None = None


class KvIdentity(KvLayout, frozen=True, omit_defaults=True, kw_only=True):
    """A layout with the digest that programs share if they read each other's blocks."""

    hash: str


class ProgramEntry(Struct, frozen=True):
    name: str
    file: str
    tp_rank: Small
    pp_stage: Small
    ep_rank: Small
    inputs: list[str]
    outputs: list[str]
    kv_groups: list[KvGroup]
    num_weights: Count
    libraries: dict[str, str]
    cubins: dict[str, str]
    memory: Memory
    kv_layout: KvIdentity


class Config(Struct, frozen=True):
    target: str
    dtype: str
    quantize: str | None
    kv_dtype: str
    max_model_len: Positive
    block_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    certify: str
    allow_drift: bool
    passes: list[str]
    tp: Positive
    pp: Positive
    ep: Positive
    redundant_experts: Count
    adapter_rank: Count = 0


class PassRow(Struct, frozen=True):
    name: str
    rewrites: Count
    nodes_before: Count
    nodes_after: Count


class KernelRow(Struct, frozen=True, omit_defaults=True):
    """A kernel of the table: one that `nodes` nodes use, or a cubin with its costs."""

    name: str
    target: str
    op: str
    nodes: Count | None = None
    registers: Count | None = None  # of a thread, as the next two
    stack_bytes: Count | None = None
    static_shared_bytes: Count | None = None  # of a block
    local_bytes: Count | None = None
    shared_bytes: Count | None = None
    num_warps: Count | None = None
    occupancy: float | None = None
    library: str | None = None


class Determinism(Struct, frozen=True):
    contract: str
    scope: str


class PlanProfile(Struct, frozen=True, omit_defaults=True, kw_only=True):
    name: str
    max_num_seqs: Positive | None = None
    max_num_tokens: Positive
    max_num_rows: Positive


class PlanRow(Struct, frozen=True):
    name: str
    calls: Count


class Tensorrt(Struct, frozen=True, omit_defaults=True):
    package: str
    version: str
    arch: str
    profiles: Annotated[list[PlanProfile], Meta(min_length=1)]
    plans: list[PlanRow] | None = None


class ManifestFacts(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The contents of engine.json without the list of files: what the runtime reads before any other file.

    host: the kind of machine that the libraries run on ("linux-x86_64"), or None if there are none; programs: one for
    each rank; tensorrt: what a TensorRT plan needs in order to run.
    """

    format_version: int
    producer: str
    targets: Annotated[list[str], Meta(min_length=1)]
    host: str | None
    model: Model
    programs: Annotated[list[ProgramEntry], Meta(min_length=1)]
    config: Config
    passes: list[PassRow]
    kernels: list[KernelRow]
    determinism: Determinism
    tensorrt: Tensorrt | None = None


class Manifest(ManifestFacts, frozen=True, kw_only=True):
    """The contents of engine.json."""

    files: dict[str, FileEntry]
    sha256: Sha256


# ------------------------------------------------------------------------------------------ program.json


class TensorType(Struct, frozen=True):
    dtype: str
    shape: list[Count | str]


class Input(Struct, frozen=True):
    name: str
    dtype: str
    shape: Shape


class Hidden(Struct, frozen=True):
    dtype: str
    shape: Shape
    value: str


class StepTypes(Struct, frozen=True):
    inputs: Annotated[list[Input], Meta(min_length=1)]
    outputs: Annotated[list[Literal["hidden", "logits"]], Meta(min_length=1)]
    hidden: Hidden


class StoredWeight(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the step's weight table: where a tensor is stored and how its bytes are read."""

    name: str
    file: str
    offset: Count  # the offset of the first byte in the file, a multiple of 64
    num_bytes: Count
    dtype: str
    shape: tuple[Count, ...]  # the shape of the logical tensor
    physical_shape: tuple[Count, ...]  # the shape of the stored tensor
    layout: str  # "" for row-major


class Observable(Struct, frozen=True):
    id: Small
    name: str
    layer: Small | None
    dtype: str
    shape: list[Count]


class Tiling(Struct, frozen=True):
    """The tiles that one instruction set takes for a product of at most `up_to` rows, and its expected speed."""

    up_to: Count
    rows: Count
    k_bytes: Count
    pairs: Count
    of_peak: float


class Product(Struct, frozen=True):
    """A matrix product of the compiled step, with its expected costs, for `inferc bench kernels`."""

    nodes: list[str]
    n: Count
    k: Count
    row_bytes: Count  # the bytes of an element of a row
    weight_bytes: float  # the bytes of an element of the weight, 0.5 for four bits
    choices: dict[str, list[Tiling]]


class Node(Struct, frozen=True, omit_defaults=True):
    """A node of the lowered graph.

    val: its type, the types of several results, or a size. in_layer: its layer, None outside of layers, and not set
    for a node that has no place in the model. place: for people, where its value lies.
    """

    op: Literal["placeholder", "get_attr", "call_function", "output"]
    id: str
    args: list[Any]
    target: str | None = None
    kwargs: dict[str, Any] | None = None
    val: TensorType | list[Any] | int | str | None = None
    name: str | None = None
    in_layer: Small | None | UnsetType = field(default=UNSET, name="layer")
    segment: str | int | None = None
    kernel: str | None = None
    place: str | None = None

    @property
    def layer(self) -> int | None:
        return None if isinstance(self.in_layer, UnsetType) else self.in_layer


class Graph(Struct, frozen=True):
    name: str
    num_layers: Count
    block_size: Count | None
    info: dict[str, Any]
    kv_groups: list[dict[str, Any]]
    symbols: dict[str, int]
    weights: dict[str, dict[str, Any]]
    nodes: list[Node]


class Where(Struct, frozen=True, omit_defaults=True):
    """The place of a launch's argument: in the arena, or the name of something that the runner holds.

    - value: a pool of the arena. The place is `offset` bytes for each of the most rows of the pool, plus `column`
      bytes, plus `shifted` bytes for each row before those whose logits are computed.
    - cache: the number of a KV group. The place is `offset` bytes from the start of the group's pool.
    - weight, input, output, state: a tensor of the artifact, an input or output of the step, or what the runner keeps.
    - counts: the sizes of the "step", or of the rows that are sampled at a time ("sample").
    - scratch: a buffer of the program's `scratch`.
    - none of them: the kernel does not read the argument.
    """

    value: Pool | None = None
    cache: Small | None = None
    offset: Count | None = None
    column: Count | None = None
    shifted: Count = 0
    weight: str | None = None
    input: str | None = None
    counts: Literal["step", "sample"] | None = None
    output: str | None = None
    state: str | None = None
    scratch: str | None = None


class Choice(Struct, frozen=True):
    """A kernel that a launch uses for at most `up_to` rows, or for any number of rows if that is None."""

    kernel: str
    up_to: Count | None


class Written(Struct, frozen=True):
    """A value of `observable` that a launch writes into the arena, in rows of `stride` elements."""

    id: Small
    value: Pool
    offset: Count
    column: Count
    stride: Positive


class Launch(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A launch of a step on a GPU: a kernel chosen by the number of rows, or a TensorRT engine for `num_ops` ops.

    only: the kind of step that needs it, or "" for every step. order: the order of addition that needs it, or None for
    both. shapes: the shapes of the engine's tensors that depend on the step, by name, with "tokens" or "rows" as the
    first axis.
    """

    node: str
    layer: Small | None
    rows: RowKind
    engine: str | None = None
    num_ops: Count = 1
    only: str = ""
    order: str | None = None
    choices: list[Choice] = []
    shapes: dict[str, list[Any]] = {}
    arguments: dict[str, Where]
    writes: list[Written]

    def is_for(self, order: str) -> bool:
        """Return whether steps of this order of addition have the launch."""
        return self.order in (None, order)


class Launches(Struct, frozen=True, omit_defaults=True):
    """The launches of a step, in parts.

    - begin: what runs once per step, before everything else.
    - step: what computes the rows that the LM head reads; head: the LM head, for a limited number of them at a time.
    - sample: from the logits of these rows to token ids; keep: which of all ids count, in steps with drafted tokens.
    - score: from their logits to the likelihood of given tokens.
    - rows: what keeps rows for a head that drafts, of its model, of its own tokens, of its own sampled rows; or empty.
    """

    begin: list[Launch]
    step: list[Launch]
    head: list[Launch]
    sample: list[Launch]
    keep: list[Launch]
    score: list[Launch]
    rows: list[Launch] = []

    def __iter__(self) -> Iterator[Launch]:
        for part in (self.begin, self.step, self.head, self.sample, self.keep, self.score, self.rows):
            yield from part


class Scratch(Struct, frozen=True, omit_defaults=True):
    """The size in bytes of a buffer that launches share: a constant, and so much for each row, token and sequence.

    It is zero at first. `per_row` is for each row that is sampled at a time. order: that of addition, None for both.
    """

    const: Count = 0
    per_token: Count = 0
    per_row: Count = 0
    per_seq: Count = 0
    order: str | None = None

    def is_for(self, order: str) -> bool:
        """Return whether steps of this order of addition have the buffer."""
        return self.order in (None, order)


class SharedPrefixes(Struct, frozen=True):
    """The size of groups of sequences whose common prefix is read once: the most members, and the unit of its keys."""

    members: Positive
    keys: Positive


NO_LAUNCHES = Launches([], [], [], [], [], [])


class PlainPart(Struct, frozen=True, kw_only=True):
    """The part of a program that its target adds, for a runtime of its own."""

    kv_layout: KvLayout = KvLayout(order="canonical")


class LibraryPart(Struct, frozen=True, kw_only=True):
    """The part that the target adds for a C++ library; the weights follow when they are stored."""

    abi: Count
    arena: MemoryFormula
    inputs: list[str]
    weights: list[StoredWeight] = []
    observable: list[Observable]
    products: list[Product]
    kv_layout: KvLayout
    vocab_size: Count


class CubinPart(Struct, frozen=True, kw_only=True):
    """The part that the target adds for GPU launches."""

    launches: Launches
    scratch: dict[str, Scratch]
    observable: list[Observable]
    shared_prefixes: dict[str, SharedPrefixes]
    kv_layout: KvLayout


# The contents of program.json, by what runs it. Fields of the others have defaults, so that any reader finds them.


class PlainProgram(PlainPart, frozen=True, omit_defaults=True, kw_only=True):
    """The contents of program.json for a runtime of its own."""

    kv_layout: KvLayout
    step: StepTypes
    weights: list[StoredWeight]
    memory_plan: MemoryPlan
    program: Graph
    observable: list[Observable] = []
    products: list[Product] = []
    launches: Launches = NO_LAUNCHES
    scratch: dict[str, Scratch] = {}
    shared_prefixes: dict[str, SharedPrefixes] = {}


class LibraryProgram(LibraryPart, frozen=True, omit_defaults=True, kw_only=True):
    """The contents of program.json with a library."""

    weights: list[StoredWeight]
    step: StepTypes
    memory_plan: MemoryPlan
    program: Graph
    launches: Launches = NO_LAUNCHES
    scratch: dict[str, Scratch] = {}
    shared_prefixes: dict[str, SharedPrefixes] = {}


class CubinProgram(CubinPart, frozen=True, omit_defaults=True, kw_only=True):
    """The contents of program.json with GPU kernels, none of whose fields for them may be left out."""

    step: StepTypes
    weights: list[StoredWeight]
    memory_plan: MemoryPlan
    program: Graph
    products: list[Product] = []


TargetPart: TypeAlias = PlainPart | LibraryPart | CubinPart
Program: TypeAlias = PlainProgram | LibraryProgram | CubinProgram


# ------------------------------------------------------------------------------------------ records.json


class RecordArgument(Struct, frozen=True, forbid_unknown_fields=True):
    """A parameter of a kernel's entry point; `kind` is as Triton writes it: *bf16, *i32, …, i32, i64 or u64."""

    name: str
    kind: str
    num_bytes: Count
    divisible_by: Positive = 1  # the caller promises that its value is a multiple of this


class RecordProduct(Struct, frozen=True, forbid_unknown_fields=True):
    """A matrix product that a library can compute in place of the kernel.

    It is out [rows, n] = x [rows, k] @ weight [n, k].T, plus bias [n] and residual [rows, n] if there are any; the
    kernel's arguments are x_ptr, weight_ptr, bias_ptr, residual_ptr and out_ptr. Strides are elements from row to row.
    """

    n: Positive
    k: Positive
    dtype: str  # of all tensors but out
    out_dtype: str
    x_stride: Count
    out_stride: Count
    has_bias: bool
    residual_stride: Count | None


class RecordLibrary(Struct, frozen=True, forbid_unknown_fields=True):
    """A library that computes the kernel's product in its place, measured to be faster from `from_rows` rows on."""

    name: str
    from_rows: Count
    product: RecordProduct


class LaunchRecord(Struct, frozen=True, forbid_unknown_fields=True):
    """The record of a cubin's entry point: how to call it, and what one of its blocks needs of a GPU."""

    name: str  # the kernel's name in the manifest's kernel table
    op: str
    arch: str
    entry: str
    grid: tuple[str, str, str]
    num_warps: Annotated[int, Meta(ge=1, le=64)]
    shared_bytes: Count
    global_scratch_bytes: Count
    arguments: tuple[RecordArgument, ...]
    constants: dict[str, bool | int | float | str | None]
    resources: dict[str, int]
    compiler: str
    # Whether it may be launched while the kernel before it still runs: it then waits for that one itself.
    dependent: bool = False
    # The library that may replace the kernel. Only kernels of the fast order for any number of rows have one.
    library: RecordLibrary | None = None

    @property
    def threads(self) -> int:
        return 32 * self.num_warps

    @property
    def block_shared_bytes(self) -> int:
        """The shared memory of a block in all; the cubin itself declares only the static part."""
        return self.shared_bytes + self.resources.get("static_shared_bytes", 0)


# ----------------------------------------------------------------------------------------------- reading


def read_typed(data: bytes, kind: type[Type]) -> Type:
    """Return the contents of a JSON file as the type `kind`.

    Raises ValueError, naming the field, where it is not of that type.
    """
    raw = parse_json(data)
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ValueError(_in_words(error)) from None


def _in_words(error: Exception) -> str:
    """Return msgspec's message (Expected `int`, got `str` - at `$.files`) with the field first."""
    if isinstance(error, RecursionError):
        return "its brackets are nested too deeply"
    text = str(error).replace("`", "")
    what, at, place = text.rpartition(" - at ")
    what = what[:1].lower() + what[1:] if at else text
    return f"{place.removeprefix('$.')}: {what}" if at and place != "$" else what
