"""The `inferc explain` command, which shows what the passes change in a model and predicts its speed on a device."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferc.cli.common import Json, fail, print_json, say
from inferc.cli.progress import progress
from inferc.cost.devices import NAMES, check_device, find_device
from inferc.errors import ArtifactError, ConfigError
from inferc.system.own_process import own_imports
from inferc.targets import DEFAULT_TARGET

if TYPE_CHECKING:
    from rich.table import Table

    from inferc.cost.formulas import CostLog
    from inferc.cost.report import CostReport, KVCost, PhaseCost, Subject

DEVICES_HELP = f"Device to predict for: {', '.join(NAMES)}. cpu is this machine; its memory is measured."
PARAMETERS = ("", " k", " M", " B", " T")
WIDTH = 100  # columns of the text on any terminal, because narrower tables would be truncated


def explain(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|OUT", help="A Hugging Face folder or hub id (config.json is enough), or an artifact."
        ),
    ],
    device: Annotated[str, typer.Option("--device", metavar="D", help=DEVICES_HELP)] = "cpu",
    target: Annotated[
        str | None,
        typer.Option(
            "--target", metavar="T", help="Target to compile for, see `inferc compile --target`; by default cpu."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            metavar="bfloat16|float32|float16|auto",
            help="Data type of weights and activations; float16 is for onnx and tensorrt.",
        ),
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option("--quantize", metavar="SCHEME", help="Quantization scheme, see `inferc compile --quantize`."),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            "--kv-dtype", metavar="int8|auto", help="Data type of the KV cache, see `inferc compile --kv-dtype`."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option("--max-model-len", metavar="N", help="Longest sequence, prompt and output, in tokens.")
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(
            "--input-len", metavar="N", help="Length of the prompt in the prefill step; by default 1024 tokens."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "--context", metavar="N", help="Length of each sequence in the decode step; by default 4096 tokens."
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="B", help="Number of sequences in the decode step.")] = 1,
    as_json: Json = False,
) -> int:
    """Show the compiler passes of MODEL or OUT, what each changes, and how fast the result can be on a device.

    Of a model only config.json is read, and nothing is written. Speeds are predicted from the bytes that a step moves
    and the arithmetic it does, at the device's limits: they are upper bounds that no implementation exceeds, not
    measurements.
    """
    from msgspec import to_builtins

    from inferc.cost.report import Workload, check_counts, report
    from inferc.manifest import MANIFEST

    check_device(device)
    check_counts(batch, context, input_len)
    if (Path(source) / MANIFEST).is_file():
        given = {"--target": target, "--dtype": dtype, "--quantize": quantize, "--kv-dtype": kv_dtype}
        set_again = [name for name, value in {**given, "--max-model-len": max_model_len}.items() if value is not None]
        if set_again:
            raise ConfigError(f"{source} is compiled already; {set_again[0]} is for a model: leave it out")
        costs, subject = _of_artifact(source)
    else:
        options = {
            "target": target or DEFAULT_TARGET,
            "dtype": dtype or "auto",
            "quantize": quantize,
            "kv_dtype": kv_dtype or "auto",
            "max_model_len": "auto" if max_model_len is None else max_model_len,
        }
        costs, subject = _of_model(source, options)
    workload = Workload.make(batch, context, input_len, costs.facts.max_model_len)
    found = report(subject, costs, find_device(device), workload)
    if as_json:
        print_json(to_builtins(found))
    else:
        say(rendered(found), end="")
    refused = found.refused
    return fail(f"{refused.pass_name} refuses the model: {refused.reason}", 1) if refused else 0


def _of_model(source: str, options: dict[str, Any]) -> tuple[CostLog, Subject]:
    from inferc.config import CompileConfig, from_dict
    from inferc.cost.report import Subject

    config = from_dict(CompileConfig, options)
    with progress("load torch") as report:
        with own_imports():
            from inferc.compiler.explain import explain_model

        explained = explain_model(source, config, report)
    return explained.costs, Subject(source, explained.config.target, explained.captured_layers, explained.refusal)


def _of_artifact(source: str) -> tuple[CostLog, Subject]:
    from inferc.cost.report import Subject
    from inferc.manifest import COSTS
    from inferc.runtime.artifact.load import load_artifact

    artifact = load_artifact(source, to_run=False)
    if COSTS not in artifact.manifest.files:
        raise ArtifactError(f"{source} was compiled by an inferc that stored no costs; compile the model again")
    targets = ", ".join(artifact.manifest.targets)
    return artifact.costs(), Subject(source, targets, captured_layers=None, refused=None)


# ----------------------------------------------------------------------------------------------------- text


def rendered(found: CostReport) -> str:
    """Return the explanation as text of at most `WIDTH` columns."""
    from rich.console import Console

    buffer = io.StringIO()
    console = Console(file=buffer, width=WIDTH, color_system=None, highlight=False, markup=False, emoji=False)
    for part in (_facts(found), "", _phase_table(found), "", _pass_table(found), "", *_notes(found)):
        console.print(part)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _facts(found: CostReport) -> Table:
    """Return a table of facts about the model, the device and the KV cache: a name and a sentence per row."""
    model, device, kv = found.model, found.device, found.kv
    size = f"{_scaled(model.num_parameters, PARAMETERS)} parameters in {model.num_layers} layers"
    limits = f"{_bytes(device.bytes_per_s)}/s, {_flops(device.flops_per_s)}/s in {device.peak_dtype}"
    ridge = f"ridge point {device.ridge_flops_per_byte:.0f} FLOPs a byte"
    cached = f"{_bytes(kv.bytes_at_context)} at {kv.context:,} tokens"
    lines = {
        "model": f"{model.architecture}, {size}, {model.dtype}: {_bytes(model.weights_bytes)} of weights",
        "lowered": f"for target {found.target}, up to {model.max_model_len:,} tokens{_captured(found)}",
        "device": f"{device.title}: {_bytes(device.memory_bytes)} at {limits}; {ridge}",
        "KV cache": f"{kv.bytes_per_token:,} bytes a token, {cached}{_gqa(kv)}",
        "fits": _fits(found),
    }
    if found.refused:
        lines["refused"] = f"by {found.refused.pass_name}; all numbers are of the program in front of it"
    table = _plain_table()
    table.add_column(no_wrap=True)
    table.add_column()
    for name, line in lines.items():
        table.add_row(name, line)
    return table


def _captured(found: CostReport) -> str:
    layers, count = found.captured_layers, found.model.num_layers
    if layers is None or layers == (count,):
        return ""
    return f"; captured with {layers[0]} and with {layers[1]} layers, which the rest of the {count} repeat"


def _gqa(kv: KVCost) -> str:
    saves, without = kv.gqa_saves, kv.bytes_without_gqa
    if saves is None or saves <= 1 or without is None:
        return ""
    what = "the latent" if any(group.kind == "latent" for group in kv.groups) else "GQA"
    return f"; {_bytes(without)} if each query head had its own K and V: {what} saves {saves:.1f}x"


def _fits(found: CostReport) -> str:
    model, device, kv = found.model, found.device, found.kv
    memory = _bytes(device.memory_bytes)
    if model.weights_bytes > device.memory_bytes:
        return f"no: {_bytes(model.weights_bytes)} of weights in {memory}; the predictions below assume that they fit"
    return f"{kv.sequences_that_fit:,} sequences of {kv.context:,} tokens in {memory}, beside the weights"


def _phases(found: CostReport) -> tuple[tuple[str, PhaseCost], ...]:
    """Return the phases with their names, in the order in which a request goes through them."""
    return ("prefill", found.phases.prefill), ("decode", found.phases.decode)


def _phase_table(found: CostReport) -> Table:
    table = _ruled_table()
    table.add_column("phase", no_wrap=True)
    table.add_column("step", no_wrap=True)
    for name in ("bytes", "weights", "KV cache", "FLOPs", "FLOPs/byte", "bound", "ms", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, phase in _phases(found):
        size = f"{phase.num_tokens:,} tokens" if name == "prefill" else f"{phase.num_seqs:,} at {phase.context:,}"
        table.add_row(
            name,
            size,
            _bytes(phase.bytes),
            _bytes(phase.weights_bytes),
            _bytes(phase.kv_bytes),
            _count(phase.flops),
            f"{phase.flops_per_byte:.1f}",
            phase.bound,
            _ms(phase.predicted_ms),
            _number(phase.tokens_per_s),
        )
    return table


def _pass_table(found: CostReport) -> Table:
    table = _ruled_table()
    table.add_column("pass", no_wrap=True)
    for name in ("rewrites", "nodes", "decode\nbytes", "\nFLOPs", "\nms", "prefill\nbytes", "\nFLOPs", "\nms"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in (found.captured, *found.passes):
        prefill = row.prefill
        table.add_row(
            row.name,
            "" if row is found.captured else f"{row.rewrites:,}",
            f"{row.nodes_after:,}",
            _bytes(row.bytes),
            _count(row.flops),
            _ms(row.predicted_ms),
            _bytes(prefill.bytes),
            _count(prefill.flops),
            _ms(prefill.predicted_ms),
        )
    return table


def _notes(found: CostReport) -> list[str]:
    """Return the notes below the tables: the meaning of the columns and the assumptions."""
    launch = f"{found.device.launch_us:g} us"
    steps = (
        "prefill is one prompt in one step, so its ms is the time to first token; decode is one new token for each"
        " sequence. The pass table has the same two steps, of the program after each pass."
    )
    moved = (
        "bytes: what the kernels of a step read and write, each its inputs and results once: weights that it uses, K"
        " and V"
        " of the context, activations. Before page_kv_cache, attention counts as if K and V were cached already."
        " FLOPs: a multiplication and an addition are two. nodes counts calls; those that are views move nothing."
    )
    time = (
        f"ms: of each kernel the longer of bytes / bandwidth and FLOPs / peak, and {launch} to start it, summed. That"
        " is the device's limit, which real kernels only come near to. bound: what the longer part of it waits for."
    )
    notes = [steps, moved, time, f"Figures of the device: {found.device.source}; the {launch} are an assumption."]
    mostly = [name for name, phase in _phases(found) if 2 * phase.launch_ms > phase.predicted_ms]
    if mostly:
        notes.append(f"{' and '.join(mostly)}: more than half of the predicted time is starting kernels.")
    if found.uniform_routing:
        notes.append(
            "Experts: a step touches as many as tokens routed at random do, in the mean; real ones touch fewer."
        )
    return notes


def _plain_table() -> Table:
    from rich.table import Table

    return Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)


def _ruled_table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)


def _scaled(value: float, units: tuple[str, ...]) -> str:
    """Return a number with three or four digits and a unit, for example 42.9 GB, 343.6 GB or 1.24 T."""
    for unit in units[:-1]:
        if value < 999.5:
            break
        value /= 1000
    else:
        unit = units[-1]
    return f"{_number(value)}{unit}"


def _number(value: float) -> str:
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def _bytes(value: float) -> str:
    return _scaled(value, (" B", " kB", " MB", " GB", " TB"))


def _count(value: float) -> str:
    return _scaled(value, ("", " k", " M", " G", " T", " P"))


def _flops(value: float) -> str:
    return _scaled(value, (" FLOP", " kFLOP", " MFLOP", " GFLOP", " TFLOP", " PFLOP"))


def _ms(value: float) -> str:
    return f"{value:.4f}" if value < 0.0995 else _number(value)
