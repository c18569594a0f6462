"""The `inferc serve` command, which serves artifacts over gRPC and HTTP."""

from __future__ import annotations

import logging
import math
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from inferc.cli.common import (
    Adapters,
    Deterministic,
    Isa,
    Json,
    KVDisk,
    KVDiskSize,
    KVEvict,
    KVMemory,
    MaxBatchedTokens,
    MaxSeqs,
    Pin,
    Policy,
    PrefixCache,
    ReasoningFormat,
    Record,
    SpecialTokensInText,
    Speculate,
    SpeculateBranches,
    SpeculateTokens,
    StructuredOutputsBackend,
    Tap,
    TbtMs,
    Threads,
    ToolFormat,
    TrustedKeys,
    engine_options,
    form_options,
    print_json,
    say,
)
from inferc.cli.config_file import read_config, resolved, said
from inferc.errors import ConfigError
from inferc.system.logging import configure

log = logging.getLogger(__name__)

STARTED = time.perf_counter()


def serve(
    context: typer.Context,
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]OUT…",
            help="Artifacts to serve, or folders of Hugging Face models, which are compiled into a cache first. Clients"
            " address each by the name of its folder, or by NAME.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 (in typer this makes the argument optional)
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE",
            callback=read_config,
            is_eager=True,
            help='TOML file that sets options by their names (max-num-seqs = 64; models = ["OUT"]). Environment'
            " variables INFERC_SERVE_… override it, and flags override those.",
        ),
    ] = None,
    print_config: Annotated[
        bool,
        typer.Option("--print-config", help="Print the configuration, with the source of each value, and exit."),
    ] = False,
    host: Annotated[
        str,
        typer.Option(
            "--host",
            metavar="HOST",
            help="Address to listen on. 0.0.0.0 accepts connections from other machines; that needs --api-keys or"
            " --tls-client-ca.",
        ),
    ] = "127.0.0.1",
    grpc_port: Annotated[
        int, typer.Option("--grpc-port", metavar="PORT", help="Port of the gRPC interface; 0 takes a free one.")
    ] = 50051,
    http_port: Annotated[
        int, typer.Option("--http-port", metavar="PORT", help="Port of the HTTP interface; 0 takes a free one.")
    ] = 8000,
    http: Annotated[
        bool, typer.Option("--http/--no-http", help="Serve OpenAI's interface over HTTP, in addition to gRPC.")
    ] = True,
    model_folder: Annotated[
        Path | None,
        typer.Option(
            "--model-folder",
            metavar="DIR",
            help="Folder of artifacts that clients may load by name while the server runs.",
        ),
    ] = None,
    speculate: Speculate = "none",
    speculate_tokens: SpeculateTokens = 15,
    speculate_branches: SpeculateBranches = 1,
    adapter: Adapters = None,
    adapter_folder: Annotated[
        Path | None,
        typer.Option(
            "--adapter-folder",
            metavar="DIR",
            help="Folder of LoRA adapters that clients may load by name while the server runs.",
        ),
    ] = None,
    structured_outputs_backend: StructuredOutputsBackend = "auto",
    tool_format: ToolFormat = None,
    reasoning_format: ReasoningFormat = None,
    trusted_keys: TrustedKeys = None,
    max_awake: Annotated[
        int | None,
        typer.Option(
            "--max-awake",
            metavar="N",
            help="Largest number of models whose engines run at once; the others sleep. A request for a sleeping model"
            " wakes it and puts the least recently used one to sleep.",
        ),
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            "--api-keys",
            metavar="FILE",
            help="Accept only clients that have an API key from this file (`inferc keys create`).",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            "--tls-cert",
            metavar="FILE",
            help="PEM file with the server's TLS certificate and its chain; read again when it changes.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None,
        typer.Option("--tls-key", metavar="FILE", help="PEM file with the private key of --tls-cert."),
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            "--tls-client-ca",
            metavar="FILE",
            help="Accept only clients with a certificate from one of the authorities in this PEM file (mTLS).",
        ),
    ] = None,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="Allow a --host that other machines reach even without keys or mTLS."),
    ] = False,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--cors-origin",
            metavar="ORIGIN",
            help="Site whose pages may send requests from a browser (https://chat.example.com, or * for all); may be"
            " repeated.",
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option("--max-prompt-tokens", metavar="N", help="Refuse requests with longer prompts than this."),
    ] = None,
    max_output_tokens: Annotated[
        int | None,
        typer.Option("--max-output-tokens", metavar="N", help="Refuse requests for longer outputs than this."),
    ] = None,
    max_n: Annotated[
        int | None, typer.Option("--max-n", metavar="N", help="Largest number of outputs (n) for one prompt.")
    ] = None,
    max_request_seconds: Annotated[
        float | None,
        typer.Option("--max-request-seconds", metavar="S", help="End requests that take longer than this."),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option("--max-body-bytes", metavar="BYTES", help="Largest size of the body of a request.")
    ] = 64 << 20,
    max_queue_seconds: Annotated[
        float | None,
        typer.Option(
            "--max-queue-seconds",
            metavar="S",
            help="Refuse a request at once if it is predicted to wait longer than this for its first token.",
        ),
    ] = None,
    drain_seconds: Annotated[
        float,
        typer.Option("--drain-seconds", metavar="S", help="Time for running requests to finish after SIGTERM."),
    ] = 30.0,
    hang_seconds: Annotated[
        float,
        typer.Option(
            "--hang-seconds",
            metavar="S",
            help="Kill and restart an engine whose step takes longer than this; 0: never.",
        ),
    ] = 60.0,
    threads: Threads = None,
    isa: Isa = "auto",
    max_num_seqs: MaxSeqs = 64,
    max_num_batched_tokens: MaxBatchedTokens = None,
    kv_memory: KVMemory = "auto",
    pin: Pin = False,
    deterministic: Deterministic = False,
    prefix_cache: PrefixCache = True,
    policy: Policy = "fcfs",
    tbt_ms: TbtMs = None,
    kv_disk: KVDisk = None,
    kv_disk_size: KVDiskSize = "auto",
    kv_evict: KVEvict = None,
    special_tokens_in_text: SpecialTokensInText = "allow",
    kv_events: Annotated[
        str | None,
        typer.Option(
            "--kv-events",
            metavar="ENDPOINT|grpc",
            help="Publish what the prefix cache stores and evicts, including the prompts' tokens, to ZeroMQ subscribers"
            " at ENDPOINT (for example tcp://127.0.0.1:5557) and to gRPC clients of SubscribeKvEvents; grpc: only to"
            " the latter.",
        ),
    ] = None,
    kv_events_replay: Annotated[
        str | None,
        typer.Option(
            "--kv-events-replay",
            metavar="ENDPOINT",
            help="ZeroMQ endpoint where subscribers of --kv-events ask for events that they missed.",
        ),
    ] = None,
    kv_events_topic: Annotated[
        str,
        typer.Option(
            "--kv-events-topic", metavar="TOPIC", help="Topic of --kv-events: the first frame of each ZeroMQ message."
        ),
    ] = "",
    record: Record = None,
    tap: Tap = None,
    tap_out: Annotated[
        Path | None,
        typer.Option(
            "--tap-out",
            metavar="DIR",
            help="Folder for the values of --tap: DIR/REQUEST.npz for each request that asks for them.",
        ),
    ] = None,
    goodput_ttft_ms: Annotated[
        float,
        typer.Option(
            "--goodput-ttft-ms",
            metavar="MS",
            help="Goodput metric: objective for the time to first token of requests that send no ttft_ms; 0: none.",
        ),
    ] = 500.0,
    goodput_tbt_ms: Annotated[
        float,
        typer.Option(
            "--goodput-tbt-ms",
            metavar="MS",
            help="Goodput metric: objective for the mean time between tokens of requests that send no tbt_ms; 0: none.",
        ),
    ] = 100.0,
    metrics_compat: Annotated[
        str,
        typer.Option(
            "--metrics-compat", metavar="none|vllm", help="Also export the metrics under the names that vLLM uses."
        ),
    ] = "none",
    log_format: Annotated[
        str,
        typer.Option(
            "--log-format",
            metavar="text|json",
            help="Format of the log; json writes one object per line, with the id of the request.",
        ),
    ] = "text",
    log_requests: Annotated[
        bool, typer.Option("--log-requests/--no-log-requests", help="Log one line for each finished request.")
    ] = False,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            metavar="URL",
            help="Send traces to an OpenTelemetry collector, for example http://127.0.0.1:4318.",
        ),
    ] = None,
    trace_ratio: Annotated[
        float,
        typer.Option(
            "--trace-ratio",
            metavar="R",
            help="Share of requests to trace, among those whose clients did not decide whether to trace them.",
        ),
    ] = 1.0,
    as_json: Json = False,
) -> int:
    """Serve artifacts over gRPC and HTTP until SIGTERM.

    The gRPC port has inferc.v1.InferenceService, KServe's protocol, health and reflection; the HTTP port has OpenAI's
    interface. The command prints `ready grpc=HOST:PORT http=HOST:PORT seconds=S` when it accepts requests; S counts
    from the start of the process.
    """
    for name, port in (("--grpc-port", grpc_port), ("--http-port", http_port)):
        if not 0 <= port <= 65535:
            raise ConfigError(f"{name} {port}: expected 1 to 65535, or 0 for a free one")
    if tap and tap_out is None:
        raise ConfigError("--tap without --tap-out DIR: say where the values of requests that ask for it shall go")
    for name, value in (("--goodput-ttft-ms", goodput_ttft_ms), ("--goodput-tbt-ms", goodput_tbt_ms)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} {value:g}: expected a number of milliseconds, 0 or more")
    if not 0 <= trace_ratio <= 1:
        raise ConfigError(f"--trace-ratio {trace_ratio:g}: expected 0 to 1")
    if otlp_endpoint is not None and not otlp_endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"--otlp-endpoint {otlp_endpoint}: expected http://HOST:PORT, for example http://127.0.0.1:4318"
        )
    if log_format not in ("text", "json"):
        raise ConfigError(f"--log-format {log_format}: expected text or json")
    if metrics_compat not in ("none", "vllm"):
        raise ConfigError(f"--metrics-compat {metrics_compat}: expected none or vllm")
    if max_awake is not None and max_awake < 1:
        raise ConfigError(f"--max-awake {max_awake}: expected 1 or more; leave it out for no limit")
    if max_body_bytes < 1:
        raise ConfigError(f"--max-body-bytes {max_body_bytes}: expected 1 or more")
    if max_queue_seconds is not None and not 0 <= max_queue_seconds < math.inf:
        raise ConfigError(f"--max-queue-seconds {max_queue_seconds:g}: expected a number of seconds, 0 or more")
    if not 0 <= hang_seconds < math.inf:
        raise ConfigError(f"--hang-seconds {hang_seconds:g}: expected a number of seconds, 0 or more")
    if not 0 <= drain_seconds < math.inf:
        raise ConfigError(f"--drain-seconds {drain_seconds:g}: expected a number of seconds, 0 or more")
    from inferc.config import EngineConfig, from_dict
    from inferc.runtime.artifact.model_folder import artifact_of
    from inferc.runtime.text.control_tokens import parse_in_text
    from inferc.serve.kv_events.log import KvPublisherConfig
    from inferc.serve.models.metrics import Objectives
    from inferc.serve.models.served_model import ModelOptions, ModelSource
    from inferc.serve.security.access import Limits
    from inferc.serve.server import Addresses, ServeConfig
    from inferc.serve.server import serve as serve_

    configure("json" if log_format == "json" else "text", logging.INFO)
    options = engine_options(
        threads,
        isa,
        max_num_seqs,
        max_num_batched_tokens,
        kv_memory,
        pin,
        deterministic,
        prefix_cache,
        policy=policy,
        tbt_ms=tbt_ms,
        kv_disk=kv_disk,
        kv_disk_size=kv_disk_size,
        kv_evict=kv_evict,
        record=record,
        tap=tap,
        tap_out=tap_out,
        trusted_keys=trusted_keys,
        speculate=speculate,
        speculate_tokens=speculate_tokens,
        speculate_branches=speculate_branches,
        adapters=adapter,
        structured_outputs_backend=structured_outputs_backend,
    )
    options |= form_options(tool_format, reasoning_format)
    if print_config:
        say(resolved(context))
        return 0
    publisher = None
    if kv_events not in (None, "grpc"):
        publisher = KvPublisherConfig(kv_events, kv_events_replay, kv_events_topic)
    elif kv_events_replay is not None or kv_events_topic:
        raise ConfigError("--kv-events-replay and --kv-events-topic need an endpoint; give --kv-events one")
    engine = from_dict(EngineConfig, {**options, "kv_events": kv_events is not None})
    settings = ServeConfig(
        models=tuple(ModelSource(each.name, artifact_of(each.path)) for each in map(ModelSource.parse, models)),
        host=host,
        grpc_port=grpc_port,
        http_port=http_port if http else None,
        options=ModelOptions(
            engine,
            max_queue_seconds=max_queue_seconds,
            drain_seconds=drain_seconds,
            hang_seconds=hang_seconds,
            max_awake=max_awake,
            log_format="json" if log_format == "json" else "text",
            log_requests=log_requests,
            special_tokens_in_text=parse_in_text(special_tokens_in_text),
            objectives=Objectives(goodput_ttft_ms or None, goodput_tbt_ms or None),
        ),
        metrics_compat="vllm" if metrics_compat == "vllm" else "none",
        api_keys=api_keys,
        limits=Limits(max_prompt_tokens, max_output_tokens, max_n, max_request_seconds),
        max_body_bytes=max_body_bytes,
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
        insecure=insecure,
        cors_origins=tuple(cors_origin or ()),
        otlp_endpoint=otlp_endpoint,
        trace_ratio=trace_ratio,
        model_folder=model_folder,
        adapter_folder=adapter_folder,
        kv_publisher=publisher,
    )

    def report(addresses: Addresses) -> None:
        seconds = round(_seconds_since_start(), 3)
        log.info("%s", ", ".join(f"{name}={value}" for name, value in said(context).items()))
        if as_json:
            print_json({"grpc": addresses.grpc, "http": addresses.http, "seconds": seconds})
        else:
            say(f"ready grpc={addresses.grpc} http={addresses.http or 'off'} seconds={seconds}", flush=True)

    return serve_(settings, report)


def _seconds_since_start() -> float:
    """Return the seconds since this process started, or since this module was imported if the kernel does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.perf_counter() - STARTED
