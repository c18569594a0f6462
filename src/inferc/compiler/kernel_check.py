"""The question whether the compiled kernels compute the model on this machine: the whole model over one longer text.

The reference is transformers' model in float32, of which one layer at a time is widened, so that it takes no more
memory than the weights as they are stored. This module imports every stage, as build.py does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from inferc.compiler import drift
from inferc.compiler.certificate import Certificate, Judge, Row
from inferc.compiler.certify import on_this_machine
from inferc.compiler.prompts import GREEDY_TOKENS
from inferc.compiler.run_kernels import run_kernels
from inferc.frontend.checkpoint.load import Checkpoint
from inferc.frontend.export import DTYPES
from inferc.frontend.reference import reference_logits, reference_model
from inferc.frontend.wide import computing_in
from inferc.ir.program import Program, target_name
from inferc.passes.quantize.schemes import budgets_of, together
from inferc.system.memory import give_back
from inferc.system.progress import Progress

DECODED = (7, 40, 130)  # after so many tokens of the text some are decoded, which must agree with a prefill
TOKEN_BUDGET = 64  # the text is computed in chunks of so many tokens


def check_kernels(
    certificate: Certificate,
    checkpoint: Checkpoint,
    programs: Sequence[Program],
    artifact: Path,
    dtype: str,
    max_model_len: int,
    allow_drift: bool,
    report: Progress,
) -> Row:
    """Run the artifact and transformers' model on the certificate's prompts, and add their rows.

    programs: what the model was lowered to, for each rank. Raises VerifyError for kernels that are off.
    """
    lossy = budgets_of(programs[0])
    reference, own = _references(certificate.prompts, checkpoint, dtype, max_model_len, not lossy, report)
    certificate.lossy, certificate.perplexity = lossy, drift.perplexity(reference, certificate.prompts)
    judge = Judge(certificate, reference, dtype, prompts=certificate.prompts, allow_drift=allow_drift)
    judge.has_router = any(
        node.op == "call_function" and target_name(node.target) == "inferc.moe_experts"
        for program in programs
        for node in program.graph.nodes
    )
    if own is not None:
        judge.add_own(own)
        del own  # logits of a large vocabulary: the kernels' come next
    if lossy:
        judge.budget = together(lossy)
    give_back()
    report("run the kernels on the same tokens", 0, 1)
    (text,) = certificate.prompts
    decoded = [text[:length] for length in DECODED if length < len(text)] or [text]
    count = max(0, min(GREEDY_TOKENS, max_model_len - max(map(len, decoded))))
    ran_by, logits, _ = run_kernels(artifact, certificate.prompts, count, token_budget=TOKEN_BUDGET, decoded=decoded)
    return judge.add("kernels", on_this_machine(ran_by), logits)


def _references(
    prompts: Sequence[Sequence[int]],
    checkpoint: Checkpoint,
    dtype: str,
    max_model_len: int,
    with_own: bool,
    report: Progress,
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Return each prompt's float32 logits by transformers, and those in `dtype` if that is another and asked for."""
    stored = checkpoint.dtype if checkpoint.dtype in DTYPES else dtype
    stage = f"run transformers' model over {sum(map(len, prompts))} tokens"
    report(stage, 0, 1)
    model = reference_model(checkpoint, stored, max_model_len)
    with computing_in(model, DTYPES["float32"], lambda layer, count: report(stage, layer, count)):
        reference = [reference_logits(model, prompt) for prompt in prompts]
    if dtype == "float32" or not with_own:
        return reference, None
    stage += f", in {dtype}"
    with computing_in(model, DTYPES[dtype], lambda layer, count: report(stage, layer, count)):
        return reference, [reference_logits(model, prompt) for prompt in prompts]
