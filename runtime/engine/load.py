"""The construction of an engine from an artifact on disk."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from inferc.config import EngineConfig, Speculate, from_dict
from inferc.errors import ConfigError, UnsupportedError
from inferc.kv_groups import CacheGroup, Eviction, cache_groups
from inferc.runtime.adapters.arrange import room_for_adapters
from inferc.runtime.adapters.store import AdapterRunner, AdapterStore, parse_adapters
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.combinations import check_options, refusal
from inferc.runtime.engine.engine import Engine, ModelLimits
from inferc.runtime.engine.scoring import Pooling
from inferc.runtime.engine.speculative import DraftModel, make_speculation, of_head
from inferc.runtime.grammar.backend import choose_backend
from inferc.runtime.grammar.compiler import GrammarCompiler
from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.record.format import Header, Identity
from inferc.runtime.record.recorder import Recorder
from inferc.runtime.record.tapped import TapCollector
from inferc.runtime.runners.api import (
    Capability,
    OpenedRunner,
    Runner,
    RunnerFactory,
    RunnerRequest,
    TappingRunner,
    capabilities_of,
)
from inferc.runtime.runners.nodes import Node, choose_nodes
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.step.generation_defaults import generation_defaults, without_text
from inferc.runtime.text.named_forms import with_forms
from inferc.targets import find_spec
from inferc.version import __version__

log = logging.getLogger(__name__)


def load_engine(
    path: str | Path | Artifact,
    *,
    target: str | None = None,
    manifest_sha256: str | None = None,
    chunked_prefill: bool = True,
    pipeline: bool = True,
    **options: Any,
) -> Engine:
    """Return an engine for the artifact at `path`; `options` are the fields of EngineConfig.

    target: None takes the artifact's first target.
    manifest_sha256: as in load_artifact.

    The weights are checked in the background, and the check ends before the first token leaves. Raises ConfigError or
    ArtifactError.
    """
    if isinstance(path, Artifact):
        artifact = path
    else:
        artifact = load_artifact(
            path, target=target, manifest_sha256=manifest_sha256, trusted_keys=options.get("trusted_keys")
        )
    target = target or artifact.manifest.targets[0]
    if (head := artifact.model.head) is not None:
        raise ConfigError(f"{artifact.path} is {of_head(artifact, head)}")
    config = from_dict(EngineConfig, options)
    factory: RunnerFactory = find_spec(target).find_runner()
    can = factory.capabilities(artifact)
    check_options(artifact, target, config, can)
    if "prefix_cache" not in can:
        config = dataclasses.replace(config, prefix_cache=False)
    check = artifact.verify_weights()
    grammars = _make_grammars(artifact, config) if "grammars" in can else None
    groups = _groups(artifact, target, config, can, chunked_prefill)
    nodes = choose_nodes(artifact.program, config.tap) if config.tap else ()
    draft = beside = None
    if Speculate.parse(config.speculate).has_runner:
        draft = DraftModel(config, artifact, target, groups)
        config, beside = draft.reduced(config, groups), draft.request()
        if draft.artifact.model.head is not None:
            can -= {"partial_blocks"}  # it can read no row of a token that was found within a block
    opened = factory.open(RunnerRequest(artifact, target, config, groups, check.wait, beside))
    runner, mover = opened.runner, opened.mover
    with ExitStack() as made:  # closes what was made if something after it fails
        made.callback(runner.close)
        if mover is not None:
            made.callback(mover.close)
        taps = _make_taps(nodes, runner, config)
        if draft is not None:
            draft.watch(runner)
        speculation = make_speculation(
            config, draft, groups, opened.config.num_blocks, artifact.vocab_size, "drafts" in can
        )
        if speculation is not None:
            made.callback(speculation.close)
        recorder = _make_recorder(artifact, target, opened, config)
        adapters = _load_adapters(artifact, runner, config, can)
        made.pop_all()

    def checked() -> None:
        check.wait()
        if draft is not None:
            draft.weights.wait()

    sizes = _scheduler_config(artifact, config, opened, groups, can, chunked_prefill)
    engine = Engine(
        runner,
        model_limits(artifact, config.kv_evict),
        sizes,
        pipeline,
        before_first_output=checked,
        mover=mover,
        recorder=recorder,
        taps=taps,
        idle_work=opened.idle_work,
        grammars=grammars,
        speculation=speculation,
        adapters=adapters,
        takes_processors="logits_processors" in can,
    )
    if opened.share_free_slots is not None:
        opened.share_free_slots(engine.scheduler.batch.free_slots)
    if engine.scheduler.cache.max_tokens < artifact.max_model_len:
        log.info(
            "the KV cache holds %d tokens and the model takes %d: longer requests are refused or cut;"
            " raise --kv-memory",
            engine.scheduler.cache.max_tokens,
            artifact.max_model_len,
        )
    return engine


def _scheduler_config(
    artifact: Artifact,
    config: EngineConfig,
    opened: OpenedRunner,
    groups: tuple[CacheGroup, ...],
    can: frozenset[Capability],
    chunked_prefill: bool,
) -> SchedulerConfig:
    resolved = opened.config
    return SchedulerConfig(
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
        partial_blocks="partial_blocks" in can,
        num_offloaded=opened.num_offloaded,
        offload_in_place="offload_in_place" in can,
        kv_events=config.kv_events,
        keep_logprobs=config.record is not None,
    )


def _groups(
    artifact: Artifact, target: str, config: EngineConfig, can: frozenset[Capability], chunked_prefill: bool
) -> tuple[CacheGroup, ...]:
    """Return the KV groups of the artifact, with the eviction that the config asks for."""
    groups = cache_groups(artifact.whole_kv_groups)
    if config.kv_evict is None:
        return groups
    groups = Eviction.parse(config.kv_evict).apply(groups, artifact.block_size)
    if Eviction.parse(config.kv_evict).chooses and "kv_evict_heavy_hitters" not in can:
        raise refusal(artifact, target, f"--kv-evict {config.kv_evict}", "it does not count attention")
    if not chunked_prefill:
        raise ConfigError("kv_evict cuts prompts where something is forgotten; turn chunked prefill on")
    return groups


def _make_grammars(artifact: Artifact, config: EngineConfig) -> Grammars | None:
    """Return what holds answers to grammars, or None for an artifact without a tokenizer, which tells tokens' bytes."""
    if not artifact.tokenizer.has_tokenizer:
        return None
    ends = model_limits(artifact).eos_token_ids

    def vocabulary() -> Vocabulary:
        from inferc.runtime.text.tokenizer import Text  # an engine loads no tokenizer before it needs one

        files = with_forms(artifact.tokenizer, config.tool_format, config.reasoning_format)
        return Vocabulary.of(Text(files), artifact.vocab_size, ends)

    choice = config.structured_outputs_backend
    if choice != "auto":
        choose_backend(choice)
    return Grammars(GrammarCompiler(vocabulary, choice), config.max_num_seqs, artifact.vocab_size)


def identity(artifact: Artifact, target: str, computed_by: str, config: EngineConfig) -> Identity:
    """Return all that decides the bits of answers besides the requests."""
    return Identity(artifact.manifest.sha256, target, computed_by, config.deterministic, config.kv_evict)


def _make_taps(nodes: tuple[Node, ...], runner: Runner, config: EngineConfig) -> TapCollector | None:
    if not nodes:
        return None
    assert isinstance(runner, TappingRunner), "it has the capability taps"
    runner.set_taps(nodes)
    return TapCollector(nodes, None if config.tap_out is None else Path(config.tap_out))


def _load_adapters(
    artifact: Artifact, runner: Runner, config: EngineConfig, can: frozenset[Capability]
) -> AdapterStore | None:
    """Load the LoRA adapters of the config; return None for an artifact without room for any."""
    room = room_for_adapters(artifact)
    wanted = parse_adapters(config.adapters)
    if room is None or "adapters" not in can:
        if wanted:
            raise UnsupportedError(
                f"--adapter {config.adapters[0]}: {artifact.path} has no room for adapters; compile the model with"
                " --adapter-rank N"
            )
        return None
    if config.record is not None:  # a recording names no files but the artifact's
        return None
    assert isinstance(runner, AdapterRunner), "it has the capability adapters"
    store = AdapterStore(runner, room, artifact.model.dtype)
    for name, path in wanted.items():
        store.load(name, path)
    return store


def _make_recorder(artifact: Artifact, target: str, opened: OpenedRunner, config: EngineConfig) -> Recorder | None:
    if config.record is None:
        return None
    header = Header(
        identity=identity(artifact, target, opened.computed_by, config),
        artifact=str(artifact.path.resolve()),
        producer=f"inferc {__version__}",
        started=time.time(),
        # Whoever replays the recording supplies the keys that they trust.
        engine=dataclasses.asdict(dataclasses.replace(config, trusted_keys=None)),
    )
    return Recorder(Path(config.record), header)


def model_limits(artifact: Artifact, kv_evict: str | None = None) -> ModelLimits:
    """Return the properties of the model that the engine must know; `kv_evict` is as in EngineConfig."""
    vocab_size = artifact.vocab_size
    eos = tuple(int(token) for token in artifact.model.eos_token_ids)
    # An end token outside of the vocabulary is never sampled.
    ends = tuple(token for token in eos if 0 <= token < vocab_size)
    return ModelLimits(
        vocab_size, artifact.max_model_len, ends, pooling_of(artifact), artifact.cache_identity(kv_evict)
    )


def pooling_of(artifact: Artifact) -> Pooling | None:
    """Return how the artifact embeds texts, or None if its model or its runner does not."""
    found = artifact.model.pooling
    if found is None or "vectors" not in capabilities_of(artifact):
        return None
    return Pooling(found.kind, found.normalize)


def model_defaults(artifact: Artifact) -> Mapping[str, Any]:
    """Return the sampling parameters that the model's makers want if a request does not set them."""
    found = generation_defaults(artifact.model.generation)
    return found if artifact.tokenizer.has_tokenizer else without_text(found)
