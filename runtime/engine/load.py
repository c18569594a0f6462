"""From an artifact on disk to an engine."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inferc.config import EngineConfig, ResolvedEngineConfig, from_dict, has_dense_cache, runs_cuda_steps
from inferc.errors import ConfigError, UnsupportedError
from inferc.kv_groups import CacheGroup, Eviction, cache_groups
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.engine import Engine, ModelLimits, Runner
from inferc.runtime.engine.scoring import Pooling
from inferc.runtime.record.format import Header, Identity
from inferc.runtime.record.recorder import Recorder
from inferc.runtime.record.tapped import TapCollector
from inferc.runtime.runners.cpu.hidden_rows import has_hidden_rows
from inferc.runtime.runners.cpu.taps import Node, choose_nodes
from inferc.runtime.runners.dense.runner import DenseRunner
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.step.sampling_params import generation_defaults, without_text
from inferc.version import __version__

if TYPE_CHECKING:
    from inferc.runtime.offload.disk import DiskTier
    from inferc.runtime.runners.cuda.driver import Driver

log = logging.getLogger(__name__)

OTHERS = {
    "cuda": "a GPU",
    "onnx": "onnxruntime",
    "tensorrt": "TensorRT",
    "tensorrt-paged": "TensorRT",
}  # whose values nobody sees


def load_engine(
    path: str | Path | Artifact,
    *,
    target: str | None = None,
    manifest_sha256: str | None = None,
    chunked_prefill: bool = True,
    pipeline: bool = True,
    **options: Any,
) -> Engine:
    """An engine for the artifact at `path`; `options` are the fields of EngineConfig.

    Without `target` it runs on the artifact's first; manifest_sha256: as load_artifact takes it. The weights are checked in the background, and the check is over
    before the first token leaves. Raises ConfigError or ArtifactError.
    """
    if isinstance(path, Artifact):
        artifact = path
    else:
        artifact = load_artifact(
            path, target=target, manifest_sha256=manifest_sha256, trusted_keys=options.get("trusted_keys")
        )
    target = target or str(artifact.manifest["targets"][0])
    config = from_dict(EngineConfig, options)
    if has_dense_cache(target):
        config = _for_dense_cache(config, target)
    check = artifact.verify_weights()
    if target.startswith("tensorrt"):
        check.wait()  # before a plan is given to TensorRT, which looks into it less closely
    groups = cache_groups(artifact.whole_kv_groups)
    if config.kv_evict is not None:
        groups = Eviction.parse(config.kv_evict).apply(groups, artifact.block_size)
        if any(group.counted for group in groups) and (target != "cpu" or len(artifact.ranks) > 1):
            what = f"{len(artifact.ranks)} ranks" if len(artifact.ranks) > 1 else f"target {target}"
            raise UnsupportedError(
                f"kv_evict {config.kv_evict}: found {what}, and attention is counted on the cpu target in one rank;"
                " use sinks:N+window:M"
            )
        if not chunked_prefill:
            raise ConfigError("kv_evict cuts prompts where something is forgotten; turn chunked prefill on")
    nodes = _tapped_nodes(artifact, target, config)
    with ExitStack() as made:  # closed again if what comes after it cannot be made
        with ExitStack() as opened:
            driver = _open_driver() if target.startswith(("cuda", "tensorrt", "onnx:cuda")) else None
            if driver is not None:
                opened.callback(driver.close)  # the runner's from then on
            disk = _open_disk(artifact, target, config, groups, driver)
            if disk is not None:
                opened.callback(disk.close)
            runner, resolved = _make_runner(artifact, target, config, groups, disk, driver)
            opened.pop_all()
        made.callback(runner.close)
        if disk is not None:
            made.callback(disk.close)
        taps = _make_taps(nodes, runner, config)
        recorder = _make_recorder(artifact, target, runner, config)
        made.pop_all()
    sizes = SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=resolved.max_num_batched_tokens,
        max_model_len=artifact.max_model_len,
        num_blocks=resolved.num_blocks,
        block_size=artifact.block_size,
        groups=groups,
        chunked_prefill=chunked_prefill,
        prefix_cache=resolved.prefix_cache,
        policy=config.policy,
        overcommit=config.overcommit,
        tbt_ms=config.tbt_ms,
        partial_blocks=target == "cpu" or runs_cuda_steps(target),
        num_lower=() if disk is None else disk.num_blocks,
        lower_in_place=target == "cpu",
        kv_events=config.kv_events,
        keep_logprobs=config.record is not None,
    )
    engine = Engine(
        *(runner, model_limits(artifact, config.kv_evict), sizes, pipeline),
        before_first_output=check.wait,
        mover=disk,
        recorder=recorder,
        taps=taps,
        idle_work=_idle_work(runner, config),
    )
    if isinstance(runner, DenseRunner):
        runner.free_slots = engine.scheduler.batch.free_slots
    if engine.scheduler.cache.max_tokens < artifact.max_model_len:
        log.info(
            "the KV cache holds %d tokens and the model takes %d: longer requests are refused or cut; raise --kv-memory",
            *(engine.scheduler.cache.max_tokens, artifact.max_model_len),
        )
    return engine


def _for_dense_cache(config: EngineConfig, target: str) -> EngineConfig:
    """The config for a cache with one block a sequence, of which nothing is shared. Raises UnsupportedError for what needs more blocks."""
    for name in ("kv_disk", "kv_evict", "kv_events"):
        if value := getattr(config, name):
            raise UnsupportedError(
                f"{name} {value}: target {target} keeps K and V of a sequence in one piece, of which nothing is given away;"
                " leave it out, or compile the model for --target cpu"
            )
    if config.record is not None:
        raise UnsupportedError(
            f"--record: the bits that {OTHERS[target.partition(':')[0]]} computes depend on what else ran, and no replay can"
            " give the same;"
            " leave it out, or compile the model for --target cpu"
        )
    others = OTHERS[target.partition(":")[0]]
    for option, is_given in (
        ("--deterministic", config.deterministic),
        (f"--isa {config.isa}", config.isa != "auto"),
        ("--pin", config.pin_threads),
    ):
        if is_given:
            raise UnsupportedError(f"{option}: {others} chooses its own kernels and threads; leave it out")
    return dataclasses.replace(config, prefix_cache=False)


def _idle_work(runner: Runner, config: EngineConfig) -> Callable[[], bool] | None:
    """Memory of the KV cache that was asked for by its size is taken before it is needed; else no more than is needed."""
    from inferc.runtime.runners.cpu.runner import ModelRunner

    if config.kv_memory_bytes == "auto" or not isinstance(runner, ModelRunner):
        return None
    return runner.back_cache


def identity(artifact: Artifact, target: str, runner: Runner, config: EngineConfig) -> Identity:
    """What decides the bits of answers besides requests."""
    isa = str(getattr(runner, "arch" if runs_cuda_steps(target) else "isa", ""))
    return Identity(str(artifact.manifest["sha256"]), target, isa, config.deterministic, config.kv_evict)


def _tapped_nodes(artifact: Artifact, target: str, config: EngineConfig) -> tuple[Node, ...]:
    """Raises UnsupportedError where nothing can be tapped, ConfigError for a name of nothing."""
    if not config.tap:
        return ()
    if (device := target.partition(":")[0]) in OTHERS or len(artifact.ranks) > 1:
        raise UnsupportedError(
            f"--tap: {artifact.path} runs on {OTHERS.get(device, 'several ranks')}, whose values"
            " are not tapped; compile the model for --target cpu, without --tp, --pp and --ep"
        )
    return choose_nodes(artifact.program, config.tap)


def _make_taps(nodes: tuple[Node, ...], runner: Runner, config: EngineConfig) -> TapCollector | None:
    if not nodes:
        return None
    runner.set_taps(nodes)  # type: ignore[attr-defined]  # of the two that `_tapped_nodes` lets through
    return TapCollector(nodes, None if config.tap_out is None else Path(config.tap_out))


def _make_recorder(artifact: Artifact, target: str, runner: Runner, config: EngineConfig) -> Recorder | None:
    if config.record is None:
        return None
    if target.startswith("tensorrt"):
        raise UnsupportedError(
            "--record: the bits that TensorRT computes depend on what else ran, and no replay can give the same; leave it"
            " out, or compile the model for --target cuda with --deterministic"
        )
    if target.startswith("cuda") and not config.deterministic:
        raise ConfigError(
            "--record on a GPU needs --deterministic: without it the bits depend on what else ran, and no replay can"
            " give the same"
        )
    header = Header(
        identity=identity(artifact, target, runner, config),
        artifact=str(artifact.path.resolve()),
        producer=f"inferc {__version__}",
        started=time.time(),
        # Who replays it trusts whom they trust.
        engine=dataclasses.asdict(dataclasses.replace(config, trusted_keys=None)),
    )
    return Recorder(Path(config.record), header)


def model_limits(artifact: Artifact, kv_evict: str | None = None) -> ModelLimits:
    """What the engine must know of the model. kv_evict: as in EngineConfig."""
    vocab_size = int(artifact.model["vocab_size"])
    eos = tuple(int(token) for token in artifact.model["eos_token_ids"])
    # One that the model cannot sample ends nothing.
    ends = tuple(token for token in eos if 0 <= token < vocab_size)
    # Another artifact of the same model may have other bits.
    kv_dtype = ",".join(str(group["dtype"]) for group in artifact.whole_kv_groups)
    if kv_evict is not None:  # K and V hold what their tokens had forgotten
        kv_dtype += f" {kv_evict}"
    identity = (str(artifact.manifest["sha256"]), kv_dtype)
    return ModelLimits(vocab_size, artifact.max_model_len, ends, pooling_of(artifact), identity)


def pooling_of(artifact: Artifact) -> Pooling | None:
    """How vectors of texts are made of an artifact's rows, where its model was made for that and its runner reads them: the
    `cpu` and `reference` targets in one rank, of rows that are floating-point numbers."""
    found = artifact.model.get("pooling")
    is_read = str(artifact.manifest["targets"][0]) in ("cpu", "reference") and len(artifact.ranks) == 1
    if found is None or not is_read or not has_hidden_rows(artifact.program):
        return None
    return Pooling(found["kind"], bool(found["normalize"]))


def model_defaults(artifact: Artifact) -> Mapping[str, Any]:
    """The sampling parameters the model's makers want where a request says nothing."""
    found = generation_defaults(artifact.model.get("generation") or {})
    return found if artifact.tokenizer.has_tokenizer else without_text(found)


def _open_driver() -> Driver:
    from inferc.runtime.runners.cuda.driver import Driver

    return Driver()


def _open_disk(
    artifact: Artifact, target: str, config: EngineConfig, groups: tuple[CacheGroup, ...], driver: Driver | None
) -> DiskTier | None:
    """The lower tier of the KV cache, if one is asked for."""
    if config.kv_disk is None:
        return None
    if target == "reference" or len(artifact.ranks) > 1:
        what = f"{len(artifact.ranks)} ranks" if len(artifact.ranks) > 1 else f"target {target}"
        raise UnsupportedError(
            f"--kv-disk: found {what}, and it needs the cpu or cuda target in one rank; leave it out"
        )
    from inferc.runtime.offload.disk import DiskTier

    # Another instruction set, or another GPU, may compute other bits.
    model, kv_dtype = model_limits(artifact, config.kv_evict).cache_identity
    isa = _isa(artifact, config) if driver is None else f"{driver.arch}{' deterministic' * config.deterministic}"
    identity = {"model": model, "kv_dtype": kv_dtype, "isa": isa}
    sizes = [artifact.block_size * group.bytes_per_token for group in groups]
    return DiskTier(Path(config.kv_disk), identity, sizes, config.kv_disk_bytes)


def _isa(artifact: Artifact, config: EngineConfig) -> str:
    from inferc.runtime.runners.cpu.abi import choose_isa

    return choose_isa(config.isa, artifact.isas)


def _make_runner(
    artifact: Artifact,
    target: str,
    config: EngineConfig,
    groups: tuple[CacheGroup, ...],
    disk: DiskTier | None,
    driver: Driver | None,
) -> tuple[Runner, ResolvedEngineConfig]:
    """What runs the artifact's steps, and the config with every "auto" settled for it."""
    if driver is not None and target.startswith("tensorrt:"):
        from inferc.runtime.runners.dense.tensorrt import open_tensorrt

        return open_tensorrt(artifact, config, groups, driver)
    if driver is not None and target == "onnx:cuda":
        from inferc.runtime.runners.dense.onnxruntime import open_onnx_cuda

        return open_onnx_cuda(artifact, config, groups, driver)
    if driver is not None:
        return _make_cuda_runner(artifact, target, config, groups, disk, driver)
    resolved = config.resolve(artifact.max_model_len, artifact.block_size, groups)
    if target == "reference":
        if len(artifact.ranks) > 1:
            raise UnsupportedError(
                f"{artifact.path} holds {len(artifact.ranks)} ranks for the reference target, which runs one;"
                " compile it for --target cpu, or without --tp, --pp and --ep"
            )
        from inferc.runtime.runners.reference import ReferenceRunner

        return ReferenceRunner(artifact, resolved), resolved
    if target.startswith("onnx"):
        from inferc.runtime.runners.dense.onnxruntime import open_onnx

        return open_onnx(artifact, resolved), resolved
    if len(artifact.ranks) > 1:
        from inferc.runtime.runners.cpu.rank_group import RankGroup

        return RankGroup(artifact, resolved), resolved
    from inferc.runtime.runners.cpu.runner import ModelRunner

    if disk is None:
        return ModelRunner(artifact, resolved), resolved
    runner = ModelRunner(artifact, resolved, files=list(zip(disk.files, disk.num_blocks, strict=True)))
    disk.attach(
        [runner.blocks(group) for group in range(len(groups))], [len(of["layers"]) for of in artifact.kv_groups]
    )
    return runner, resolved


def _make_cuda_runner(
    artifact: Artifact,
    target: str,
    config: EngineConfig,
    groups: tuple[CacheGroup, ...],
    disk: DiskTier | None,
    driver: Driver,
) -> tuple[Runner, ResolvedEngineConfig]:
    from inferc.runtime.runners.cuda.memory import kv_available
    from inferc.runtime.runners.cuda.runner import CudaRunner

    with ExitStack() as made:
        engines = None
        if target.startswith("tensorrt-paged"):
            from inferc.runtime.runners.cuda.engines import open_engines

            engines = open_engines(artifact, config, driver)  # first, since what they take is not in the artifact
            made.callback(engines.close)
        free, _ = driver.memory_info()
        available = kv_available(artifact, config, groups, free, driver.name)
        resolved = config.resolve(artifact.max_model_len, artifact.block_size, groups, available, "cuda")
        lower = () if disk is None else disk.map_files()
        runner = CudaRunner(artifact, resolved, driver, owns_driver=True, lower=lower, engines=engines)
        made.pop_all()
    if disk is not None:
        disk.attach_device(runner.num_blocks, runner.read_block)
    return runner, resolved
