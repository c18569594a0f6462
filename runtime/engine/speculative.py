"""The speculation of an engine, as its options ask: the drafter, and the runner of a draft model or of a head."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from inferc.config import EngineConfig, Speculate
from inferc.errors import ArtifactError, ConfigError
from inferc.kv_groups import CacheGroup, CacheLimits, cache_groups, shared_part
from inferc.manifest import HEAD_IDS, MANIFEST, MTP, Head
from inferc.runtime.artifact.files import AGAIN
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.combinations import may_draft
from inferc.runtime.runners.api import HeadRunner, KeepingRunner, Runner, RunnerFactory, RunnerRequest, TappingRunner
from inferc.runtime.runners.nodes import Node, all_nodes
from inferc.runtime.speculation.draft_model import ModelDrafter
from inferc.runtime.speculation.drafter import Drafter
from inferc.runtime.speculation.forced import ForcedDrafter
from inferc.runtime.speculation.head import HeadDrafter
from inferc.runtime.speculation.head_rows import HostRows, KeptRows, RowSource
from inferc.runtime.speculation.ngram import NgramDrafter
from inferc.runtime.speculation.speculation import Speculation
from inferc.runtime.speculation.stepping import DraftSizes
from inferc.runtime.step.limits import outside
from inferc.runtime.step.plan import I32
from inferc.targets import find_spec

log = logging.getLogger(__name__)

MOST_BATCHED_TOKENS = 512  # tokens of a step of the draft model


class DraftModel:
    """The draft model, or the head, that `--speculate` names, checked against the model that it drafts for."""

    def __init__(self, config: EngineConfig, artifact: Artifact, target: str, groups: Sequence[CacheGroup]) -> None:
        """Load the artifact of the draft model or of the head.

        groups: the KV groups of the model that it drafts for. Raises ConfigError for one of another vocabulary, block
        size or target, or for a head of another model, and ArtifactError for what is no artifact.
        """
        self.option = f"--speculate {config.speculate}"
        wanted = Speculate.parse(config.speculate)
        if wanted.method == "mtp":
            self.artifact = mtp_of(artifact, target)
        else:
            self.artifact = load_artifact(Path(wanted.path), target=target, trusted_keys=config.trusted_keys)
        self.target, self._config = target, config
        self.groups = tuple(CacheGroup(group.bytes_per_token) for group in cache_groups(self.artifact.whole_kv_groups))
        self._check_kind(wanted.method)
        self._check(artifact, groups)
        self._given = () if self.artifact.model.head is None else self._nodes_for(artifact, self.artifact.model.head)
        self._max_model_len = artifact.max_model_len
        self._block_bytes = self.artifact.block_size * sum(group.bytes_per_token for group in self.groups)
        self._budget = max(MOST_BATCHED_TOKENS, config.max_num_seqs)  # tokens of a step
        self.weights = self.artifact.verify_weights()
        self._row_store: Any = None  # where the model's rows are that a head reads, if they are on a device

    def _check_kind(self, method: str) -> None:
        head = self.artifact.model.head
        if (found := "draft" if head is None else head.kind) != method:
            if head is not None and head.kind == "mtp":
                raise ConfigError(f"{self.option}: {self.artifact.path} is {of_head(self.artifact, head)}")
            what = "a model of its own" if head is None else f"an {found} head"
            raise ConfigError(f"{self.option}: {self.artifact.path} is {what}; give --speculate {found}:PATH")

    def _nodes_for(self, artifact: Artifact, head: Head) -> tuple[Node, ...]:
        """Return the nodes of the large model whose rows the head reads.

        Raises ConfigError for a head of another model.
        """
        model = artifact.model
        for what, found, expected in (
            ("of rows of", head.hidden_size, model.hidden_size),
            ("of a model with a number of layers of", head.num_layers, model.num_attention_layers),
        ):
            if found != expected:
                raise ConfigError(
                    f"{self.option} is a head {what} {found}, and {artifact.path} has {expected}; compile it with"
                    " --head-of the folder of this model"
                )
        known = all_nodes(artifact.program)
        (dtype,) = {each.dtype for each in self.artifact.program.step.inputs if each.name == "hidden_in"}
        nodes = [known.get(name) for name in head.inputs]
        for name, node in zip(head.inputs, nodes, strict=True):
            if node is None or node.by_logits_row or node.shape != (head.hidden_size,):
                raise ConfigError(
                    f"{self.option}: the step of {artifact.path} has no {name} with a row for each token, which the"
                    " head reads; compile it with --head-of the folder of this model"
                )
            if node.dtype != dtype:
                raise ConfigError(
                    f"{self.option}: the head reads rows in {dtype}, and those of {artifact.path} are in {node.dtype};"
                    f" compile the head with --dtype {node.dtype}"
                )
        return tuple(dict.fromkeys(node for node in nodes if node is not None))

    def _check(self, artifact: Artifact, groups: Sequence[CacheGroup]) -> None:
        mine = self.artifact
        if all(group.frees_blocks for group in groups):
            raise ConfigError(
                f"{self.option}: every layer of {artifact.path} attends to a window, so no block table tells where all"
                " tokens are; use --speculate ngram"
            )
        if (count := len(mine.ranks)) > 1:
            raise ConfigError(f"{self.option}: it runs in {count} ranks; compile it without --tp, --pp and --ep")
        if mine.block_size != artifact.block_size:
            raise ConfigError(
                f"{self.option}: its KV blocks hold {mine.block_size} tokens, and those of {artifact.path}"
                f" {artifact.block_size}; compile both with the same block_size"
            )
        if difference := vocabulary_difference(artifact, mine):
            raise ConfigError(
                f"{self.option} has another vocabulary than {artifact.path}: {difference}; a draft model needs the same"
            )

    def reduced(self, config: EngineConfig, groups: Sequence[CacheGroup]) -> EngineConfig:
        """Return the config of the large model, whose KV memory leaves room for that of the draft model."""
        if config.kv_memory_bytes == "auto":
            return config
        limits = CacheLimits(
            self.artifact.block_size, self._max_model_len, config.max_num_seqs, config.token_budget(self.target)
        )
        return replace(config, kv_memory_bytes=shared_part(groups, self.groups, limits, config.kv_memory_bytes))

    def request(self, num_blocks: int | None = None) -> RunnerRequest:
        """Return the request for the draft model's runner. num_blocks: None if it is not known yet."""
        config = self._config
        own = replace(
            config,
            kv_memory_bytes="auto" if num_blocks is None else num_blocks * self._block_bytes,
            max_num_batched_tokens=self._budget,
            speculate="none",
            speculate_branches=1,
            prefix_cache=False,
            kv_events=False,
            record=None,
        )
        return RunnerRequest(self.artifact, self.target, own, self.groups, self.weights.wait, row_store=self._row_store)

    def watch(self, runner: Runner) -> None:
        """Have the large model's runner show the rows that a head reads."""
        if isinstance(runner, KeepingRunner):
            self._row_store = runner.row_store
        elif self._given:
            assert isinstance(runner, TappingRunner), "it has the capability heads"
            runner.set_taps(self._given)

    def open(self, num_blocks: int) -> Drafter:
        """Open the runner of what drafts with that many blocks, and return the drafter."""
        config, artifact = self._config, self.artifact
        factory: RunnerFactory = find_spec(self.target).find_runner()
        opened = factory.open(self.request(num_blocks))
        log.info("%s: %.1f MB of K and V", self.option, num_blocks * self._block_bytes / 1e6)
        sizes = DraftSizes(
            artifact.block_size,
            artifact.max_model_len,
            artifact.vocab_size,
            len(self.groups),
            self._budget,
            config.speculate_branches - 1,
        )
        head = artifact.model.head
        if head is None:
            return ModelDrafter(opened.runner, sizes, config.max_num_seqs, config.speculate_tokens)
        if isinstance(opened.runner, TappingRunner):
            opened.runner.set_taps([all_nodes(artifact.program)[head.own]])
        (width,) = {int(each.shape[1]) for each in artifact.program.step.inputs if each.name == "hidden_in"}
        rows: RowSource = KeptRows()
        if self._row_store is None:
            rows = HostRows(tuple(head.inputs), head.own, width)
        runner, ids = cast(HeadRunner, opened.runner), self._token_ids(head)
        return HeadDrafter(runner, sizes, config.max_num_seqs, config.speculate_tokens, rows, ids)

    def _token_ids(self, head: Head) -> I32 | None:
        """Return the model's id of each token that the head can draft; None: all, in their order."""
        artifact = self.artifact
        if HEAD_IDS not in artifact.manifest.files:
            return None
        ids = np.frombuffer(artifact.read(HEAD_IDS), "<i4").astype(np.int32)
        if len(ids) != head.num_logits or outside(ids, artifact.vocab_size):
            raise ArtifactError(
                f"{artifact.path / HEAD_IDS}: {len(ids)} ids up to {ids.max(initial=0)}, expected {head.num_logits} of"
                f" a vocabulary of {artifact.vocab_size}; {AGAIN}"
            )
        return ids


def mtp_of(artifact: Artifact, target: str | None = None) -> Artifact:
    """Return the MTP layer in an artifact; raise ConfigError for an artifact without.

    Its files are among the artifact's own, by whose digests and signature they were checked.
    """
    name = f"{MTP}/{MANIFEST}"
    if name not in artifact.manifest.files:
        raise ConfigError(
            f"--speculate mtp: {artifact.path} has no MTP layers; compile the model with --mtp, if its checkpoint has"
            " them"
        )
    return load_artifact(artifact.path / MTP, target=target, manifest_sha256=artifact.read_json(name)["sha256"])


def of_head(artifact: Artifact, head: Head) -> str:
    """Return text that says for whom a head drafts and how to run it."""
    if head.kind == "mtp":
        return f"the MTP layer of a model; run {artifact.path.parent} with --speculate mtp"
    return f"a head that drafts for another model; run that one with --speculate {head.kind}:{artifact.path}"


def make_speculation(
    config: EngineConfig,
    draft: DraftModel | None,
    groups: Sequence[CacheGroup],
    num_blocks: Sequence[int],
    vocab_size: int,
    can_draft: bool = True,
) -> Speculation | None:
    """Return what drafts tokens, or None if nothing may be drafted.

    Without speculation the tokens are drafted that a grammar forces, if the runner takes drafts (`can_draft`) and no
    option speaks against it. draft: the draft model or the head, if one is asked for. num_blocks: of each of `groups`.
    vocab_size: of the model that is drafted for.
    """
    wanted, count = Speculate.parse(config.speculate), config.speculate_tokens
    method = wanted.method
    if method == "none" and (not can_draft or not may_draft(config)):
        return None
    other: Drafter | None = None
    if method == "ngram":
        other = NgramDrafter(config.max_num_seqs, count, wanted.is_shared)
    elif draft is not None:
        full = next(count for group, count in zip(groups, num_blocks, strict=True) if not group.frees_blocks)
        other = draft.open(full)
    return Speculation(ForcedDrafter(count, other), config.max_num_seqs, vocab_size)


def vocabulary_difference(one: Artifact, other: Artifact) -> str:
    """Return how the tokens of two artifacts differ, in words; empty if no token has two meanings."""
    mine, theirs = _vocabulary(one), _vocabulary(other)
    if not mine or not theirs:
        if one.vocab_size == other.vocab_size:
            return ""
        return f"{other.vocab_size} tokens, not {one.vocab_size}"
    for token, text in sorted(mine.items()):
        if token in theirs and theirs[token] != text:
            return f"token {token} is {theirs[token]!r:.40}, not {text!r:.40}"
    if len(mine.keys() - theirs.keys()) + len(theirs.keys() - mine.keys()) > len(mine) // 10:
        return f"{len(theirs)} tokens, not {len(mine)}"
    return ""


def _vocabulary(artifact: Artifact) -> dict[int, str]:
    """Return the text of each token of an artifact's tokenizer.json; empty if it has none."""
    data = artifact.tokenizer.contents.get("tokenizer.json")
    if data is None:
        return {}
    read = json.loads(data)
    vocab = read["model"]["vocab"]
    if isinstance(vocab, list):  # of unigrams, with their scores
        found = {token: str(text) for token, (text, _) in enumerate(vocab)}
    else:
        found = {int(token): text for text, token in vocab.items()}
    return found | {int(each["id"]): each["content"] for each in read.get("added_tokens", ())}
