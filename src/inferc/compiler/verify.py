"""The command `inferc verify`: it computes an artifact's certificate again, on this machine, with its own kernels.

This module imports every stage, as certify.py does.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from inferc.backends.lower import LowerConfig, lower
from inferc.backends.partition import prepare
from inferc.compiler.certify import Certificate, Certifier, encoder, make_prompts, run_kernels
from inferc.compiler.diff import check_same
from inferc.errors import UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import load
from inferc.ir.program import Program
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.system.progress import Progress
from inferc.system.resources import available_memory_bytes
from inferc.targets import Target

COPIES = 2  # copies of the model in float32 that memory must hold: Hugging Face's and the program's weights


def verify(out: Path, model: str, report: Progress) -> dict[str, Any]:
    """Compute an artifact's certificate again and return its rows as JSON.

    The keys are `ok`, `reason`, the kernels' `max_abs_error`, `kl`, `top1_agreement` and `greedy_equal`, `num_prompts`,
    and `passes` with all rows.

    model: the model that OUT was compiled from. The passes of this inferc lower it again, and after each pass that
    changes something the references compute its logits; then OUT itself is run. Every row is compared with Hugging
    Face's model in float32 and judged as at compile time. Raises ConfigError for another model, UnsupportedError for an
    artifact that cannot be verified here.
    """
    artifact = load_artifact(out)
    target = Target.parse(artifact.config.target)
    _check_verifiable(artifact, target)
    report("try the artifact", 0, 1)
    load_engine(artifact, max_num_seqs=1).close()  # report what this machine lacks now, not after the references
    report("read the model", 0, 1)
    checkpoint = load(model)
    check_same(artifact, checkpoint)
    dtype, max_model_len = artifact.config.dtype, artifact.max_model_len
    program = capture(checkpoint, dtype, max_model_len, check=False)
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
    config = LowerConfig(
        target,
        artifact.config.block_size,
        quantize=artifact.config.quantize,
        kv_dtype=artifact.config.kv_dtype,
    )

    def observe(index: int, name: str, rewrites: int, lowered: Program) -> None:
        report("lower and certify", index, len(artifact.manifest.passes))
        certifier.observe(index, name, rewrites, lowered)

    if len(artifact.ranks) > 1:
        prepare(program, config, observe)
    else:
        lower(program, config, observe=observe)
    report("run the artifact", 0, 1)
    certifier.add_kernels(*run_kernels(out, certifier.certificate.prompts, certifier.greedy_tokens))
    return _to_json(certifier.certificate)


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
    needed, free = COPIES * 4 * artifact.model.num_parameters, available_memory_bytes()
    if needed > free:
        raise UnsupportedError(
            f"{artifact.path}: verify holds the model in float32 twice, {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB"
            " are free; use inferc diff, or a machine with more memory"
        )


def _to_json(certificate: Certificate) -> dict[str, Any]:
    """Return what `verify` returns."""
    rows = certificate.rows
    kernels = rows[-1]
    failed = next((row for row in rows if not row.ok), None)
    return {
        "ok": failed is None,
        "reason": "" if failed is None else f"{failed.name}: {failed.reason}",
        "max_abs_error": kernels.max_abs_error,
        "kl": kernels.kl,
        "top1_agreement": kernels.top1_agreement,
        "greedy_equal": kernels.greedy_equal,
        "num_prompts": len(certificate.prompts),
        "passes": [asdict(row) for row in rows],
    }
