"""The compiler behind `inferc.compile`, from a Hugging Face model to an artifact. It imports every stage.

The stages are frontend (capture) → passes (lower) → codegen (kernels, weights, manifest) → certificate → one rename.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import platform
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from inferc.backends.backend import Backend, EarlyBackend, Output, Written, open_backend
from inferc.backends.lower import LowerConfig, build_pipeline, lower
from inferc.backends.partition import RankProgram, Ranks, lower_ranks, partition, prepare
from inferc.chat.named_forms import check_names
from inferc.codegen.artifact_writer import ArtifactWriter, program_entry
from inferc.codegen.folder import OutputFolder
from inferc.codegen.select import kernel_named
from inferc.compiler.certificate import Certificate
from inferc.compiler.certify import Certifier, threads_for
from inferc.compiler.equivalence import ProgramCheck
from inferc.compiler.head_check import HeadCheck, check_head_config, check_mtp_config
from inferc.compiler.kernel_check import check_kernels
from inferc.compiler.price import price
from inferc.compiler.prompts import encoder, make_long_prompt, make_prompts
from inferc.compiler.run_kernels import run_kernels
from inferc.config import CompileConfig, ResolvedCompileConfig
from inferc.cost.expert_loads import ExpertLoads
from inferc.cost.recorder import CostRecorder
from inferc.errors import ConfigError, RequestError
from inferc.frontend.capture import capture
from inferc.frontend.check import random_copy
from inferc.frontend.checkpoint.load import Checkpoint, load, load_module
from inferc.frontend.checkpoint.mtp_layers import mtp_layers
from inferc.frontend.export import context_length
from inferc.frontend.heads.load import load_head
from inferc.frontend.heads.load_mtp import load_mtp
from inferc.frontend.text.generation import eos_token_ids, generation_defaults
from inferc.frontend.text.pooling import pooling
from inferc.frontend.text.text_files import tokenizer_files
from inferc.ir import program as program_lib
from inferc.ir.program import Program
from inferc.manifest import (
    CERTIFICATE,
    COSTS,
    FORMAT_VERSION,
    HEAD_IDS,
    MANIFEST,
    MTP,
    PROGRAM,
    json_bytes,
)
from inferc.manifest_types import (
    Config,
    FileEntry,
    KernelRow,
    ManifestFacts,
    Model,
    PassRow,
    ProgramEntry,
    Quantization,
)
from inferc.passes.parallel.expert_placement import Placement, placements
from inferc.passes.pipeline import Observe, PassRecord
from inferc.passes.user_passes import UserPass, load_passes
from inferc.runtime.step.generation_defaults import generation_defaults as request_defaults
from inferc.runtime.text.tokenizer import Text
from inferc.system.interrupts import Interrupts, interruptible
from inferc.system.progress import Progress, silent
from inferc.targets import Target
from inferc.version import __version__

log = logging.getLogger(__name__)

Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class CompileSummary:
    """A summary of what a compile made and how long it took."""

    path: Path
    seconds: float
    weights_bytes: int
    artifact_bytes: int
    config: ResolvedCompileConfig
    passes: list[PassRecord]
    kernels: list[KernelRow]
    certificate: Certificate | None

    def to_json(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self),
            "path": str(self.path),
            "kernels": msgspec.to_builtins(self.kernels),
            "certificate": None if self.certificate is None else self.certificate.to_json(),
        }


def compile(
    model: str | Path | torch.nn.Module,
    out: str | Path,
    config: CompileConfig | None = None,
    *,
    tokenizer: Any = None,
    progress: Progress | None = None,
    head_of: str | Path | None = None,
    mtp: bool = False,
) -> CompileSummary:
    """Compile `model` into the artifact folder `out`.

    model: a Hugging Face folder, a hub id, or a transformers causal language model in memory, which comes with its
    `tokenizer` (transformers' own; without one the artifact takes and returns token ids only).
    `out` appears complete or not at all; an artifact that is there already is replaced in one move.
    progress: called with each stage and how much of it is done.
    head_of: the folder or hub id of the model that `model`, the folder of an EAGLE-3 head, drafts for.
    mtp: also compile the MTP layers of the model's checkpoint, which draft tokens for it.
    """
    start = time.perf_counter()
    config = config or CompileConfig()
    if head_of is not None:
        check_head_config(config)
    if mtp:
        check_mtp_config(config, head_of is not None)
    check_names(config.tool_format, config.reasoning_format)
    backend = open_backend(Target.parse(config.target))
    passes = load_passes(config.passes)
    with interruptible() as interrupts, OutputFolder(Path(out)) as folder:
        report = interrupts.checked(progress or silent)
        checkpoint = _load(model, head_of)
        if not mtp:
            _tell_of_mtp(checkpoint)
        num_parameters = sum(torch.Size(shape).numel() for shape, _ in checkpoint.tensors.values())
        ranks = _ranks(config)
        described = checkpoint if checkpoint.head is None else checkpoint.head.model  # a head talks as its model does
        resolved = config.resolve(described.dtype, context_length(checkpoint.config))
        generation = generation_defaults(described)
        request_defaults(generation)  # before compiling, report defaults that no request may have
        of_user = (tokenizer, report, interrupts, generation, passes, ranks)
        forms = (config.tool_format, config.reasoning_format)
        build = _Build(checkpoint, resolved, backend, folder, *of_user, forms=forms, mtp=mtp)
        with threads_for(num_parameters):
            if mtp:
                build.add_mtp()
            certificate = build.run()
        interrupts.check()
        folder.commit()
    return CompileSummary(
        path=folder.out,
        seconds=round(time.perf_counter() - start, 3),
        weights_bytes=sum(entry.bytes for name, entry in build.writer.files.items() if entry.holds_weights(name)),
        artifact_bytes=sum(entry.bytes for entry in build.writer.files.values()),
        config=resolved,
        passes=build.records,
        kernels=build.kernels,
        certificate=certificate,
    )


def _load(model: str | Path | torch.nn.Module, head_of: str | Path | None) -> Checkpoint:
    if isinstance(model, torch.nn.Module):
        if head_of is not None:
            raise ConfigError("head_of: a head is compiled from its folder; give that in place of a module")
        return load_module(model)
    return load(model) if head_of is None else load_head(model, head_of)


def _tell_of_mtp(checkpoint: Checkpoint) -> None:
    """Say that a checkpoint has MTP layers, which are left out."""
    if count := len(mtp_layers(checkpoint.config, checkpoint.tensors)):
        what = "an MTP layer, which can draft tokens and is" if count == 1 else f"{count} MTP layers, which are"
        log.warning("%s has %s left out: give --mtp to compile it for --speculate mtp", checkpoint.name, what)


class _Build:
    """An artifact while it is built; `run` leaves `folder` complete except for the move to its place."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        config: ResolvedCompileConfig,
        backend: Backend,
        folder: OutputFolder,
        tokenizer: Any,
        report: Progress,
        interrupts: Interrupts,
        generation: dict[str, Any],
        passes: tuple[UserPass, ...],
        ranks: Ranks,
        for_here: bool = False,
        forms: tuple[str | None, str | None] = (None, None),
        mtp: bool = False,
    ) -> None:
        self.forms = forms  # the names of those of calls and reasoning
        self.checkpoint, self.config, self.folder, self.report = checkpoint, config, folder, report
        self.interrupts, self.generation = interrupts, generation
        self.writer = ArtifactWriter(folder, config.allow_drift)
        self.lower_config = LowerConfig(
            Target.parse(config.target),
            config.block_size,
            passes,
            config.quantize,
            config.kv_dtype,
            config.adapter_rank,
            mtp,
        )
        self.pipeline = build_pipeline(self.lower_config)
        self.target = self.lower_config.target
        self.tokenizer, self.ranks = tokenizer, ranks
        self.backend = backend
        self.output = Output(self.writer, folder.path, self.lower_config, report, ranks.count, for_here)
        self.records: list[PassRecord] = []
        self.kernels: list[KernelRow] = []

    def _check_chat(self) -> None:
        """Check that the runtime renders conversations as transformers does, and warn where it does not.

        A model whose chat template the runtime cannot run is still useful for plain prompts.
        """
        try:
            Text(self.folder.path / "tokenizer").chat_template  # noqa: B018 (it compares as it is made)
        except RequestError as error:
            log.warning("%s: chats will be refused: %s", self.checkpoint.name, error)

    def add_mtp(self) -> None:
        """Write the artifact of the model's MTP layer into a folder of this one, among whose files its files are."""
        head = load_mtp(self.checkpoint, self.config.dtype, self.config.max_model_len)

        def report(stage: str, done: int, total: int) -> None:
            self.report(f"MTP layer: {stage}", done, total)

        with OutputFolder(self.folder.path / MTP) as folder:
            build = _Build(
                head,
                replace(self.config, adapter_rank=0),
                self.lower_config.backend(self.target),
                folder,
                self.tokenizer,
                report,
                self.interrupts,
                self.generation,
                self.lower_config.passes,
                self.ranks,
                forms=self.forms,
            )
            build.run()
            folder.commit()
        self.writer.files.update({f"{MTP}/{name}": entry for name, entry in build.writer.files.items()})
        data = (folder.out / MANIFEST).read_bytes()
        self.writer.files[f"{MTP}/{MANIFEST}"] = FileEntry(len(data), sha256=hashlib.sha256(data).hexdigest())

    def run(self) -> Certificate | None:
        """Write everything; return the certificate."""
        self.report("read the tokenizer", 0, 1)
        head = self.checkpoint.head
        described = self.checkpoint if head is None else head.model
        tokenizer = tokenizer_files(described, self.tokenizer, self.generation, *self.forms)
        for name, data in tokenizer.items():
            self.writer.add(f"tokenizer/{name}", data)
        if "chat_template.jinja" in tokenizer:
            self._check_chat()
        if head is not None and head.token_ids is not None:
            self.writer.add(HEAD_IDS, head.token_ids.numpy().astype("<i4").tobytes())
        self.report("capture", 0, 1)
        is_compared = self.config.certify == "auto" or head is not None
        program = capture(self.checkpoint, self.config.dtype, self.config.max_model_len, is_compared=is_compared)
        encode = encoder(tokenizer.get("tokenizer.json"))
        certify = {"auto": self._certify, "full": self._certify_whole, "layers": self._certify_layers}
        if head is not None:
            certify = dict.fromkeys(certify, self._certify_head)
        make = certify.get(self.config.certify)
        if make is None:
            self.lower_and_write(program, None)
            return None
        manifest, certificate = make(program, encode)
        self.writer.add(CERTIFICATE, json_bytes(certificate.to_json()))
        self.writer.write_manifest(manifest)
        return certificate

    def _certify(self, program: Program, encode: Encode | None) -> tuple[ManifestFacts, Certificate]:
        """Write the artifact; certify that the program is the model, and that the kernels compute it here."""
        captured = program_lib.copy(program)
        length, allow_drift = self.config.max_model_len, self.config.allow_drift
        certificate = Certificate("", [make_long_prompt(encode, program.info.vocab_size, length)])
        lowered: list[RankProgram] = []

        def check(ranks: list[RankProgram]) -> None:
            lowered.extend(ranks)
            check = ProgramCheck(self.checkpoint, captured, ranks, self.lower_config, self.ranks, length)
            stage = f"certify, {price('auto', captured)}"
            certificate.scope = check.run(certificate, allow_drift, self.report, stage)

        manifest = self.lower_and_write(program, None, check)
        if self.target.spec.kernels_certified == "compile":
            programs = [each.program for each in lowered]
            check_kernels(
                certificate,
                self.checkpoint,
                programs,
                self.folder.path,
                self.config.dtype,
                length,
                allow_drift,
                self.report,
            )
            certificate.scope += f"; the kernels on the model itself, over {len(certificate.prompts[0])} tokens of text"
        return manifest, certificate

    def _certify_whole(self, program: Program, encode: Encode | None) -> tuple[ManifestFacts, Certificate]:
        """Certify the whole model after every pass, while it is lowered."""
        self._check_lowers(program)
        self.report(f"certify, {price('full', program)}", 0, 1)
        certifier = self._certifier(self.checkpoint, program, "the model itself", encode)
        manifest = self.lower_and_write(program, certifier)
        self._certify_kernels(certifier, self.folder.path)
        return manifest, certifier.certificate

    def _certify_layers(self, program: Program, _encode: Encode | None) -> tuple[ManifestFacts, Certificate]:
        """Write the artifact; certify a small random copy of the model after every pass."""
        copied = random_copy(program, self.checkpoint, self.config.dtype, self.ranks.pp, self.ranks.tp)
        manifest = self.lower_and_write(program, None)
        return manifest, self._certify_copy(copied).certificate

    def _certify_head(self, program: Program, _encode: Encode | None) -> tuple[ManifestFacts, Certificate]:
        """Write the artifact of a head; certify that its program and its kernels compute the head."""
        lowered: list[RankProgram] = []
        manifest = self.lower_and_write(program, None, lowered.extend)
        self.report("certify the head", 0, 1)
        has_kernels = self.target.spec.kernels_certified == "compile"
        check = HeadCheck(self.checkpoint, lowered[0].program, self.config.dtype, self.config.allow_drift)
        return manifest, check.run(self.folder.path if has_kernels else None)

    def _check_lowers(self, program: Program) -> None:
        """Raise what lowering would refuse.

        Lowering is tried on a copy, as the reference runs before the real lowering and may take minutes. The copy has
        symbols of its own: the numbers of the real program's are in the artifact.
        """
        twin = program_lib.from_json(program_lib.to_json(program))
        self.report("check the kernels", 0, 1)
        for own in lower_ranks(twin, self.lower_config, self.ranks):
            self.backend.try_write(own.program, self.lower_config)

    def lower_and_write(
        self, program: Program, certifier: Certifier | None, check: Callable[[list[RankProgram]], None] | None = None
    ) -> ManifestFacts:
        """Lower `program` and write its artifact without a certificate; return the manifest without the files.

        check: is given the lowered programs of all ranks before anything is written.
        """
        costs = CostRecorder()
        ranks = self._lower(program, certifier, costs)
        if check is not None:
            if isinstance(self.backend, EarlyBackend):
                self.backend.begin(ranks, self.output)
            check(ranks)
        first = ranks[0].program
        self.writer.add(COSTS, json_bytes(costs.log(first).stored))
        stages = [each.program for each in ranks if (each.tp_rank, each.ep_rank) == (0, 0)]
        self.kernels = _kernel_rows(stages, self.lower_config)
        weights = {each.prefix + name: weight for each in ranks for name, weight in each.program.weights.items()}
        self.writer.add_weights(
            weights, self.checkpoint.reader, lambda done, total: self.report("write weights", done, total)
        )
        written = [self.backend.write(each, self.output) for each in ranks]
        programs = [self._add_program(rank, each) for rank, each in zip(ranks, written, strict=True)]
        self.kernels += [row for each in written for row in each.kernels]
        manifest = ManifestFacts(
            format_version=FORMAT_VERSION,
            producer=f"inferc {__version__}",
            targets=list(self.target.each),
            host=f"{platform.system()}-{platform.machine()}".lower() if written[0].libraries else None,
            model=self._model(program, _quantization(stages)),
            programs=programs,
            config=Config(**{**dataclasses.asdict(self.config), "passes": list(self.config.passes)}),
            passes=[_pass_row(record) for record in self.records],
            kernels=self.kernels,
            determinism=self.target.spec.determinism,
            tensorrt=written[0].tensorrt,
        )
        self.writer.write_manifest(manifest)
        return manifest

    def _lower(self, program: Program, certifier: Certifier | None, costs: CostRecorder) -> list[RankProgram]:
        """Lower the program; return the lowered programs of all ranks.

        After the partition, the pass log and the costs are those of the first rank.
        """
        observe = self._observer(certifier, costs)
        if self.ranks.count == 1:
            self.records = lower(program, self.lower_config, observe=observe)
            return [RankProgram(program, 0, 0)]
        shared = prepare(program, self.lower_config, observe)
        first = self.ranks.label(0, 0, 0)

        def observe_rank(label: str) -> Observe:
            own = self._observer(None, costs if label == first else None, label)

            def observe(index: int, name: str, rewrites: int, program: Program) -> None:
                name, rewrites = (name, rewrites) if index else ("partition", self.ranks.count)
                own(len(shared) + 1 + index, name, rewrites, program)

            return observe

        ranks = partition(program, self.lower_config, self.ranks, observe_rank)
        nodes = [shared[-1].nodes_after, ranks[0].records[0].nodes_before]
        self.records = [*shared, PassRecord("partition", self.ranks.count, 0.0, *nodes), *ranks[0].records]
        if certifier is not None:
            certifier.observe_ranks(ranks)
        return ranks

    def _add_program(self, rank: RankProgram, written: Written) -> ProgramEntry:
        """Write the program of one rank, whose code is already written; return its entry in the manifest."""
        file = f"program-{rank.label}.json" if rank.label else PROGRAM
        self.writer.add_program(rank.program, written.plan, written.part, file, rank.prefix)
        return program_entry(
            rank.program,
            file=file,
            ranks={"tp_rank": rank.tp_rank, "pp_stage": rank.pp_stage, "ep_rank": rank.ep_rank},
            libraries=written.libraries,
            cubins=written.cubins,
            arena=written.arena,
            kv_layout=written.part.kv_layout,
        )

    def _observer(self, certifier: Certifier | None, costs: CostRecorder | None, label: str = "") -> Observe:
        """Return an observer of passes that keeps the program's text and costs after each and informs the certifier."""
        folder = f"graph/{label}" if label else "graph"

        def observe(index: int, name: str, rewrites: int, program: Program) -> None:
            self.report("lower" if certifier is None else "lower and certify", index, len(self.pipeline))
            self.writer.add(f"{folder}/{index:02}_{name}.txt", program.to_text().encode())
            if costs is not None:
                costs(index, name, rewrites, program)
            if certifier is not None:
                certifier.observe(index, name, rewrites, program)

        return observe

    def _certifier(self, checkpoint: Checkpoint, program: Program, scope: str, encode: Encode | None) -> Certifier:
        config = self.config
        prompts = make_prompts(encode, program.info.vocab_size, config.max_model_len)
        return Certifier(
            checkpoint,
            config.dtype,
            prompts,
            scope,
            max_model_len=config.max_model_len,
            allow_drift=config.allow_drift,
            kernels_round=self.target.spec.kernels_round_rows,
        )

    def _certify_copy(self, copied: Checkpoint) -> Certifier:
        """Certify a small random copy, which is compiled in the same way as the real artifact and then thrown away."""
        layers = copied.config.num_hidden_layers
        self.report(f"certify, a small random copy of the first {layers} layers", 0, 1)
        with tempfile.TemporaryDirectory() as scratch, OutputFolder(Path(scratch) / "copy") as folder:
            quiet = self.interrupts.checked(silent)
            build = _Build(
                copied,
                self.config,
                self.lower_config.backend(self.target),
                folder,
                None,
                quiet,
                self.interrupts,
                self.generation,
                self.lower_config.passes,
                replace(self.ranks, placements={at: each for at, each in self.ranks.placements.items() if at < layers}),
                for_here=True,
            )
            program = capture(copied, self.config.dtype, self.config.max_model_len, check=False)
            scope = f"a random copy of the first {layers} layers, which hold every kind of layer of the model"
            certifier = self._certifier(copied, program, scope, None)
            build.lower_and_write(program, certifier)
            self._certify_kernels(certifier, folder.path)
        return certifier

    def _certify_kernels(self, certifier: Certifier, artifact: Path) -> None:
        if self.target.spec.kernels_certified == "compile":
            self.report("certify the kernels", 0, 1)
            ran_by, logits, greedy = run_kernels(artifact, certifier.certificate.prompts, certifier.greedy_tokens)
            certifier.add_kernels(ran_by, logits, greedy)

    def _model(self, program: Program, quantization: Quantization | None) -> Model:
        """Return the facts that the runtime needs of the model."""
        defaults, info = self.generation, program.info
        return Model(
            model_type=info.model_type,
            architecture=info.architecture,
            vocab_size=info.vocab_size,
            hidden_size=info.hidden_size,
            num_attention_layers=info.num_attention_layers,
            max_position_embeddings=info.max_position_embeddings,
            max_model_len=info.max_model_len,
            dtype=info.dtype,
            num_parameters=info.num_parameters,
            tied_embeddings=info.tied_embeddings,
            rope=info.rope,
            ignored_tensors=info.ignored_tensors,
            quantization=quantization,
            bos_token_id=defaults.get("bos_token_id"),
            eos_token_ids=eos_token_ids(defaults),
            generation=defaults,
            pooling=pooling(self.checkpoint),
            hf_config=hf_facts(self.checkpoint),
            head=None if self.checkpoint.head is None else self.checkpoint.head.facts,
        )


# Entries of a Hugging Face config that do not describe the model: where it was, and what wrote it.
VOLATILE_FACTS = ("_name_or_path", "transformers_version")


def hf_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the entries of the Hugging Face config that describe the model, as JSON reads them back."""
    config = checkpoint.config.to_dict()
    facts = {key: value for key, value in sorted(config.items()) if key not in VOLATILE_FACTS}
    return dict(json.loads(json_bytes(facts)))


def _ranks(config: CompileConfig) -> Ranks:
    """Return over how many ranks to spread the model; raise ConfigError for sizes that do not go together."""
    placed: dict[int, Placement] = {}
    if config.expert_loads is not None:
        if config.ep == 1:
            raise ConfigError(f"--expert-loads {config.expert_loads}: it places experts on --ep ranks; give --ep N")
        loads = ExpertLoads.load(Path(config.expert_loads))
        placed = placements(loads, config.ep, config.redundant_experts)
    return Ranks(config.tp, config.pp, config.ep, placed)


def _quantization(stages: Sequence[Program]) -> Quantization | None:
    """Return what the pass `quantize` reports, summed over all pipeline stages."""
    found = [program.info.quantization for program in stages]
    done = [each for each in found if isinstance(each, Quantization)]
    if not done:
        return None
    kept: Counter[str] = Counter()
    for each in done:
        kept.update(each.kept)
    return Quantization(done[0].scheme, sum(each.products for each in done), dict(kept))


def _kernel_rows(programs: Sequence[Program], config: LowerConfig) -> list[KernelRow]:
    """Return the kernel table: each kernel that a node uses, and by how many nodes it is used."""
    nodes = [node for program in programs for node in program.graph.nodes]
    counts = Counter(str(node.meta["kernel"]) for node in nodes if "kernel" in node.meta)
    return [
        KernelRow(kernel.name, str(config.target), kernel.op, nodes=count)
        for kernel, count in ((kernel_named(name, config.kernels), count) for name, count in counts.items())
    ]


def _pass_row(record: PassRecord) -> PassRow:
    """Return a line of the manifest's pass log, without the time it took, so that equal input gives equal bytes."""
    return PassRow(record.name, record.rewrites, record.nodes_before, record.nodes_after)
