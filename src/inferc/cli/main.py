"""The `inferc` command line; each command imports the stages that it needs, so that `inferc --help` loads none.

Standard output carries a command's result and nothing else (with --json one JSON object); progress, logs and errors go
to standard error. Exit codes: 0 done, 1 the work failed, 2 bad usage or bad input, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inferc.cli.batch import batch
from inferc.cli.bench import bench_app
from inferc.cli.cache import cache_app
from inferc.cli.common import (
    Isa,
    Json,
    KVEvict,
    MaxBatchedTokens,
    OutOrModel,
    OutputError,
    ReasoningFormat,
    Threads,
    ToolFormat,
    command,
    decode_utf8,
    engine,
    engine_options,
    fail,
    log,
    open_streams,
    print_json,
    say,
    writing,
)
from inferc.cli.config_file import ENVIRONMENT
from inferc.cli.diff import diff
from inferc.cli.doctor import doctor
from inferc.cli.explain import explain
from inferc.cli.generate import chat, generate
from inferc.cli.habits import OF_CHATTING, OF_GENERATING, OF_SERVERS
from inferc.cli.inspect import inspect
from inferc.cli.keys import keys_app
from inferc.cli.progress import progress
from inferc.cli.replay import replay
from inferc.cli.serve import serve
from inferc.cli.sign import sign
from inferc.cli.simulate import simulate
from inferc.cli.top import top
from inferc.cli.verify import verify
from inferc.errors import ConfigError
from inferc.system import env as debug
from inferc.system.own_process import exit_uncollected, own_imports
from inferc.version import __version__

if TYPE_CHECKING:
    from inferc.cost.expert_loads import ExpertLoads
    from inferc.runtime.engine.engine import Engine

app = typer.Typer(
    name="inferc",
    help="Ahead-of-time compiler and runtime for LLM inference: compile a model once, then run it anywhere.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(cache_app, name="cache")
app.add_typer(keys_app, name="keys")

EXPERIMENTAL = " (experimental: all ranks run in one process, which tries a split model and makes it no faster)."


def main() -> None:
    """Run the `inferc` command."""
    open_streams()
    exit_uncollected()
    try:
        with writing():  # covers the help texts; commands handle errors of their own output
            app()
    except OutputError as error:
        sys.exit(fail(str(error), error.exit_code))


def _say_version(wanted: bool) -> None:
    if wanted:
        say(f"inferc {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    level = logging.INFO if debug.level() else logging.WARNING
    # `serve` lowers the threshold of the root logger later; this one stays, so that only INFERC_DEBUG shows tracebacks.
    log.setLevel(level)
    logging.basicConfig(level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s")


# ------------------------------------------------------------------------------------------------- compile


@command(app, "compile")
def compile_model(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A Hugging Face model folder or hub id.")],
    out: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="The folder to write.")],
    target: Annotated[
        str,
        typer.Option(
            "--target",
            metavar="cpu|cuda:sm_90|onnx|onnx:cuda|onnx:standard|tensorrt:sm_86|tensorrt-paged:sm_86|reference",
            help="What to compile for. For NVIDIA GPUs name one chip or several (cuda:sm_90,sm_80); they need not be in"
            " this machine. onnx:standard uses only standard ONNX operators instead of onnxruntime's own, and is"
            " slower. tensorrt builds the whole step as one TensorRT plan; tensorrt-paged uses TensorRT around inferc's"
            " own paged attention.",
        ),
    ] = "cpu",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            metavar="bfloat16|float32|float16|auto",
            help="Data type of weights and activations. auto: the checkpoint's, as far as the target has it; float16 is"
            " for onnx and tensorrt.",
        ),
    ] = "auto",
    quantize: Annotated[
        str | None,
        typer.Option(
            "--quantize",
            metavar="SCHEME",
            help="Store weights in 8 or 4 bits, rounded to nearest. int8: one scale per output channel, half the bytes"
            " of bfloat16, activations in --dtype (W8A16). w8a8: activations of projections and experts are int8 too,"
            " with one scale per token; faster with many tokens, but less accurate. fp8: projection weights and"
            " activations in E4M3, for tensorrt and tensorrt-paged on sm_89 and later. int4, int4-g32, int4-g64,"
            " int4-g128 (W4A8): projections and experts in four bits with one scale per group of 32 (int4), 64 or 128"
            " weights, activations as in w8a8, embedding and LM head as in int8. Norms and routers stay in --dtype;"
            " --kv-dtype sets the KV cache.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str,
        typer.Option(
            "--kv-dtype",
            metavar="int8|auto",
            help="Data type of the KV cache. int8: one scale per head and token for K and for V, about half the bytes"
            " of bfloat16. auto: the same as --dtype.",
        ),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len",
            metavar="N",
            help="Longest sequence, prompt and output, in tokens; by default the length the model was trained for.",
        ),
    ] = None,
    certify: Annotated[
        str,
        typer.Option(
            "--certify",
            metavar="full|layers|none|auto",
            help="How to check the artifact's numbers against Hugging Face's. auto: the program in float32 on as many"
            " layers as hold all kinds, and the kernels on the whole model; full: the whole model after each pass,"
            " which takes minutes and the model twice in float32; layers: a small copy with random weights after each"
            " pass; none: no check. `inferc inspect OUT --json` shows the certificate that results.",
        ),
    ] = "auto",
    allow_drift: Annotated[
        bool, typer.Option("--allow-drift", help="Keep the artifact even if its numbers fail the check.")
    ] = False,
    passes: Annotated[
        list[str] | None,
        typer.Option(
            "--pass",
            metavar="MODULE:NAME",
            help="Your own compiler pass: a Python module and an object in it, or FILE.py:NAME; may be repeated. It"
            " runs after the pass split_head, when nearly all fusions are done, unless it asks for another place"
            " (inferc.extend holds what a pass needs).",
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option("--tp", metavar="N", help=f"Split every layer over N tensor ranks{EXPERIMENTAL}")
    ] = 1,
    pp: Annotated[
        int, typer.Option("--pp", metavar="N", help=f"Split the layers into N pipeline stages{EXPERIMENTAL}")
    ] = 1,
    ep: Annotated[
        int, typer.Option("--ep", metavar="N", help=f"Spread the experts of MoE layers over N ranks{EXPERIMENTAL}")
    ] = 1,
    expert_loads: Annotated[
        str | None,
        typer.Option(
            "--expert-loads",
            metavar="FILE",
            help="Place experts on ranks by how many tokens each one gets, from a profile that `inferc eval"
            " --record-expert-loads` wrote.",
        ),
    ] = None,
    redundant_experts: Annotated[
        int,
        typer.Option(
            "--redundant-experts",
            metavar="N",
            help="With --expert-loads: number of extra copies of the most loaded experts.",
        ),
    ] = 0,
    adapter_rank: Annotated[
        int,
        typer.Option(
            "--adapter-rank",
            "--max-lora-rank",
            metavar="N",
            help="Make room for LoRA adapters of rank N or less (at most 256), which `serve`, `generate` and `chat`"
            " load with --adapter NAME=PATH. 0: none.",
        ),
    ] = 0,
    tool_format: ToolFormat = None,
    reasoning_format: ReasoningFormat = None,
    add_target: Annotated[
        bool,
        typer.Option(
            "--add-target", help="Add code for the chips of --target to the existing artifact OUT; its weights stay."
        ),
    ] = False,
    head_of: Annotated[
        str | None,
        typer.Option(
            "--head-of",
            metavar="MODEL",
            help="Compile a head that drafts tokens for this model, given as it was compiled: a folder or a hub id. The"
            " argument is then the folder of an EAGLE-3 head; run it with --speculate eagle3:OUT beside the model.",
        ),
    ] = None,
    mtp: Annotated[
        bool,
        typer.Option(
            "--mtp",
            help="Also compile the MTP layer that the model's checkpoint carries, which drafts tokens with --speculate"
            " mtp.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile MODEL into the artifact OUT.

    With --tp, --pp or --ep the artifact holds a program for each rank.
    """
    from inferc.config import CompileConfig, from_dict

    config = from_dict(
        CompileConfig,
        {
            "target": target,
            "dtype": dtype,
            "quantize": quantize,
            "kv_dtype": kv_dtype,
            "max_model_len": "auto" if max_model_len is None else max_model_len,
            "certify": certify,
            "allow_drift": allow_drift,
            "passes": tuple(passes or ()),
            "tp": tp,
            "pp": pp,
            "ep": ep,
            "expert_loads": expert_loads,
            "redundant_experts": redundant_experts,
            "adapter_rank": adapter_rank,
            "tool_format": tool_format,
            "reasoning_format": reasoning_format,
        },
    )
    if add_target and (tool_format or reasoning_format):
        option = "--tool-format" if tool_format else "--reasoning-format"
        raise ConfigError(f"{option}: --add-target leaves the text of the artifact as it is; compile the model anew")
    if passes:
        sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    with progress("load torch") as report:
        if add_target:
            if head_of is not None:
                raise ConfigError("--add-target: the code of a head is for one target; leave --head-of out")
            if mtp:
                raise ConfigError("--add-target: the code of MTP layers is for one target; leave --mtp out")
            with own_imports():
                from inferc.compiler.add_target import add_target as add

            summary = add(model, out, config, progress=report)
        else:
            with own_imports():
                from inferc.compiler.build import compile as compile_

            summary = compile_(model, out, config, progress=report, head_of=head_of, mtp=mtp)
    if as_json:
        print_json(summary.to_json())
        return
    megabytes = summary.artifact_bytes / 1e6
    kv_dtype = summary.config.kv_dtype
    kv = f", KV cache in {kv_dtype}" if kv_dtype != summary.config.dtype else ""
    dtype = " ".join(filter(None, (summary.config.dtype, summary.config.quantize)))
    say(f"{out}: {summary.config.target}, {dtype}{kv}, {megabytes:.1f} MB, {summary.seconds:.1f} s")
    if debug.level():
        for record in summary.passes:
            print(f"  {record.name:24} {record.rewrites:5} rewrites  {record.seconds:7.3f} s", file=sys.stderr)


command(app, "explain")(explain)


command(app, "sign")(sign)


command(app, "inspect")(inspect)

# ---------------------------------------------------------------- generate, chat, batch, serve, replay, diff, eval

command(app, "generate", foreign=OF_GENERATING)(generate)
command(app, "chat", foreign=OF_CHATTING)(chat)
command(app, "batch")(batch)
command(app, "serve", ENVIRONMENT, foreign=OF_SERVERS)(serve)
command(app, "simulate")(simulate)
command(app, "top")(top)
command(app, "doctor")(doctor)
command(app, "replay")(replay)
command(app, "diff")(diff)
command(app, "verify")(verify)


@command(app, "eval")
def evaluate(
    out: OutOrModel,
    text: Annotated[Path, typer.Option("--text", metavar="FILE", help="The text to evaluate, in UTF-8.")],
    window: Annotated[
        int | None,
        typer.Option(
            "--window",
            metavar="N",
            help="Tokens in each window of text; by default 1024, or the model's longest sequence if that is shorter.",
        ),
    ] = None,
    record_expert_loads: Annotated[
        Path | None,
        typer.Option(
            "--record-expert-loads",
            metavar="FILE",
            help="Write to FILE how many tokens each expert got; `inferc compile --ep N --expert-loads FILE` uses it to"
            " place experts.",
        ),
    ] = None,
    threads: Threads = None,
    isa: Isa = "auto",
    max_num_batched_tokens: MaxBatchedTokens = None,
    kv_evict: KVEvict = None,
    as_json: Json = False,
) -> None:
    """Compute the perplexity of an artifact on a text.

    The text is tokenized as a whole, with BOS if the model's tokenizer adds one, and cut into windows that do not
    overlap. Every token of a window except the first is scored, given the tokens before it in the window.
    """
    from inferc.config import EngineConfig
    from inferc.runtime.artifact.load import load_artifact
    from inferc.runtime.artifact.model_folder import artifact_of
    from inferc.runtime.measure.evaluate import WINDOW, kv_cache_bytes, perplexity
    from inferc.runtime.text.tokenizer import Text

    content = _read_text(text)
    artifact = load_artifact(artifact_of(out))
    size = min(WINDOW, artifact.max_model_len) if window is None else window
    if not 2 <= size <= artifact.max_model_len:
        raise ConfigError(f"--window {size}: expected 2 to {artifact.max_model_len}, what the artifact is compiled for")
    ids = Text(artifact.tokenizer).encode(content)
    # Allow as many sequences as tokens, so that a step scores every row it computes. The KV cache is sized separately,
    # because it need not hold that many sequences.
    budget = EngineConfig().token_budget() if max_num_batched_tokens is None else max_num_batched_tokens
    options = engine_options(threads, isa, budget, budget, kv_evict=kv_evict)
    options["kv_memory_bytes"] = kv_cache_bytes(artifact, size)
    profiles: list[ExpertLoads] = []

    def record(started: Engine) -> None:
        from inferc.runtime.measure.expert_loads import record_loads

        profiles.append(record_loads(artifact, started))

    on_start = None if record_expert_loads is None else record
    with engine(artifact, options, on_start) as client, progress("eval") as report:
        result = perplexity(client, ids, size, lambda done, total: report("eval", done, total))
    if record_expert_loads is not None:
        profiles[0].save(record_expert_loads)
    if as_json:
        print_json(dataclasses.asdict(result))
        return
    say(f"perplexity {result.perplexity:.4f}  nll {result.nll:.6f}  tokens {result.tokens}")


def _read_text(path: Path) -> str:
    try:
        return decode_utf8(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
