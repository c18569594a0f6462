"""The command `inferc verify`: it computes an artifact's certificate again, on this machine, with its own kernels.

This module imports every stage, as certify.py does.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from inferc.backends.lower import LowerConfig, lower
from inferc.backends.partition import Ranks, lower_ranks, prepare
from inferc.compiler.certificate import Certificate, Row
from inferc.compiler.certify import Certifier, threads_for
from inferc.compiler.diff import check_same
from inferc.compiler.equivalence import ProgramCheck
from inferc.compiler.kernel_check import check_kernels
from inferc.compiler.prompts import encoder, make_long_prompt, make_prompts
from inferc.compiler.run_kernels import run_kernels
from inferc.errors import UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import Checkpoint, load
from inferc.ir import program as program_lib
from inferc.ir.program import Program
from inferc.manifest import MANIFEST, MTP
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.system.progress import Progress
from inferc.system.resources import available_memory_bytes
from inferc.targets import Target

COPIES = 2  # copies of the model in float32 that memory must hold: Hugging Face's and the program's weights


@dataclass(frozen=True)
class Verification:
    """The certificate of an artifact, computed again; the numbers between `reason` and `num_prompts` are the kernels'.

    reason: the first row that is over its budget, and why; passes: all rows, the kernels' last.
    """

    ok: bool
    reason: str
    max_abs_error: float | None
    kl: float | None
    top1_agreement: float
    greedy_equal: int | None
    num_prompts: int
    passes: list[Row]


def verify(out: Path, model: str, report: Progress) -> Verification:
    """Compute an artifact's certificate again.

    model: the model that OUT was compiled from. The passes of this inferc lower it again, which is compared with the
    model as `--certify auto` does, or, for an artifact of `--certify full`, after each pass; then OUT itself is run.
    Every row is compared with Hugging Face's model in float32 and judged as at compile time. Raises ConfigError for
    another model, UnsupportedError for an artifact that cannot be verified here.
    """
    artifact = load_artifact(out)
    target = Target.parse(artifact.config.target)
    _check_verifiable(artifact, target)
    report("try the artifact", 0, 1)
    load_engine(artifact, max_num_seqs=1).close()  # report what this machine lacks now, not after the references
    report("read the model", 0, 1)
    checkpoint = load(model)
    check_same(artifact, checkpoint)
    program = capture(checkpoint, artifact.config.dtype, artifact.max_model_len, check=False)
    with threads_for(artifact.model.num_parameters):
        if artifact.config.certify == "full" and _whole_fits(artifact):
            return _whole(artifact, target, checkpoint, program, report)
        return _short(artifact, target, checkpoint, program, report)


def _lower_config(artifact: Artifact, target: Target) -> LowerConfig:
    config = artifact.config
    mtp = f"{MTP}/{MANIFEST}" in artifact.manifest.files
    return LowerConfig(target, config.block_size, quantize=config.quantize, kv_dtype=config.kv_dtype, mtp=mtp)


def _short(
    artifact: Artifact, target: Target, checkpoint: Checkpoint, program: Program, report: Progress
) -> Verification:
    """Ask the two questions of `--certify auto`."""
    captured = program_lib.copy(program)
    config = _lower_config(artifact, target)
    ranks = Ranks(artifact.config.tp, artifact.config.pp, artifact.config.ep)
    lowered = lower_ranks(program, config, ranks)
    encode = encoder(artifact.tokenizer.contents.get("tokenizer.json"))
    length = artifact.max_model_len
    certificate = Certificate("", [make_long_prompt(encode, program.info.vocab_size, length)])
    check = ProgramCheck(checkpoint, captured, lowered, config, ranks, length)
    check.run(certificate, allow_drift=True, report=report)
    programs = [each.program for each in lowered]
    check_kernels(certificate, checkpoint, programs, artifact.path, artifact.config.dtype, length, True, report)
    return _verification(certificate)


def _whole(
    artifact: Artifact, target: Target, checkpoint: Checkpoint, program: Program, report: Progress
) -> Verification:
    dtype, max_model_len = artifact.config.dtype, artifact.max_model_len
    report("run the reference", 0, 1)
    encode = encoder(artifact.tokenizer.contents.get("tokenizer.json"))
    certifier = Certifier(
        checkpoint,
        dtype,
        make_prompts(encode, program.info.vocab_size, max_model_len),
        "the model itself",
        max_model_len=max_model_len,
        allow_drift=True,
        kernels_round=target.spec.kernels_round_rows,
    )
    config = _lower_config(artifact, target)

    def observe(index: int, name: str, rewrites: int, lowered: Program) -> None:
        report("lower and certify", index, len(artifact.manifest.passes))
        certifier.observe(index, name, rewrites, lowered)

    if len(artifact.ranks) > 1:
        prepare(program, config, observe)
    else:
        lower(program, config, observe=observe)
    report("run the artifact", 0, 1)
    certifier.add_kernels(*run_kernels(artifact.path, certifier.certificate.prompts, certifier.greedy_tokens))
    return _verification(certifier.certificate)


def _whole_fits(artifact: Artifact) -> bool:
    """Tell whether the model fits twice in memory in float32: Hugging Face's and the program's weights."""
    return COPIES * 4 * artifact.model.num_parameters <= available_memory_bytes()


def _check_verifiable(artifact: Artifact, target: Target) -> None:
    """Raise UnsupportedError for an artifact that cannot be verified here."""
    if target.spec.kernels_certified == "never":
        raise UnsupportedError(
            f"{artifact.path} is for target {target}, which runs on {target.spec.runs_on}: verify does not judge that;"
            " use inferc diff, and inferc eval OUT for its loss"
        )
    if artifact.config.passes:
        raise UnsupportedError(
            f"{artifact.path} was compiled with --pass {', '.join(artifact.config.passes)}, which verify does not run;"
            " use inferc diff"
        )


def _verification(certificate: Certificate) -> Verification:
    rows = certificate.rows
    kernels = rows[-1]
    failed = next((row for row in rows if not row.ok), None)
    return Verification(
        ok=failed is None,
        reason="" if failed is None else f"{failed.name}: {failed.reason}",
        max_abs_error=kernels.max_abs_error,
        kl=kernels.kl,
        top1_agreement=kernels.top1_agreement,
        greedy_equal=kernels.greedy_equal,
        num_prompts=len(certificate.prompts),
        passes=rows,
    )
