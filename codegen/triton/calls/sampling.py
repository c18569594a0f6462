"""The launches around a step's own: filling in the ids sampled by the step before, sampling and scoring."""

from __future__ import annotations

from dataclasses import replace

from inferc.arena import mask_words
from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.calls.builder import Call, Choice
from inferc.codegen.triton.kernels.sampling.choose import choose, list_stride
from inferc.codegen.triton.kernels.sampling.fill_late_ids import fill_late_ids
from inferc.codegen.triton.kernels.sampling.keep_chosen import keep_chosen
from inferc.codegen.triton.kernels.sampling.process_logits import apply_lists, penalize
from inferc.codegen.triton.kernels.sampling.report_logprobs import report_logprobs
from inferc.codegen.triton.kernels.sampling.row_parts import part_of, row_parts
from inferc.codegen.triton.kernels.sampling.score_rows import score_rows
from inferc.codegen.triton.kernels.sampling.search import PLACES
from inferc.codegen.values import Operand
from inferc.manifest_types import Scratch, Where

INPUTS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "counters", "num_logprobs", "lists")},
    **{name: name for name in ("typical_p", "xtc_probability", "xtc_threshold")},
    **{name: name for name in ("bias_starts", "banned_starts", "allowed_starts", "mask_rows", "target_ids")},
    **{name: name for name in ("late_rows", "late_slots", "num_late")},
    "inputs": "token_ids",
    "logits_rows": "logits_rows",
    "slots": "sampled_slots",
    "repetition": "repetition_penalty",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
}
"""The kernels' arguments that are inputs of the step, and the names of these inputs."""
STATE = ("last_ids", "count_table")
OUTPUTS = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs", "argmax")
SCRATCH = ("x", "tops", "first", "mass", "list_values", "list_ids", "masks")


def scratch(vocab: int) -> dict[str, Scratch]:
    """Return the scratch memory besides the logits, by name.

    It is bytes for each row that is sampled at a time; the masks are sent for a whole step.
    """
    parts = -(-vocab // part_of(vocab))
    whole = 4 * list_stride(vocab)
    sizes = {
        **dict.fromkeys(("x", "list_values", "list_ids"), whole),
        "tops": 4 * parts * PLACES.value,
        **dict.fromkeys(("first", "mass"), 4 * parts),
    }
    rows = {name: Scratch(per_row=size) for name, size in sizes.items()}
    return {**rows, "masks": Scratch(per_seq=4 * mask_words(vocab))}


def sampling_launches(logits: Operand) -> dict[str, list[Call]]:
    """Return the launches before a step ("begin"), after its logits ("sample"), and to score logits ("score").

    "keep" has those after all rows are sampled, for steps whose tokens were drafted.
    """
    vocab, stride, x_stride = logits.width, logits.stride, list_stride(logits.width)
    at = Where(logits.pool, offset=logits.offset, column=logits.column)

    def made(name: str, source: Source) -> Call:
        arguments = {argument: _where(argument, at) for argument in source.signature}
        return Call(None, name, "rows", (Choice(source),), arguments, [])

    late = made("fill_late_ids", fill_late_ids())
    keep = made("keep_chosen", keep_chosen())
    of_step = {**late.arguments, "token_ids_ptr": Where(input="token_ids")}
    return {
        "begin": [replace(late, rows="tokens", arguments=of_step)],
        "sample": [
            made("penalize", penalize(vocab, stride, x_stride)),
            made("apply_lists", apply_lists(vocab, stride, x_stride)),
            made("row_parts", row_parts(vocab, stride, x_stride)),
            made("choose", choose(vocab, stride, x_stride)),
            made("report_logprobs", report_logprobs(vocab, stride)),
        ],
        "keep": [replace(keep, arguments={**keep.arguments, "counts_ptr": Where(counts="step")})],
        "score": [made("score_rows", score_rows(vocab, stride))],
    }


def _where(argument: str, logits: Where) -> Where:
    name = argument.removesuffix("_ptr")
    if name == "logits":
        return logits
    if name == "counts":
        return Where(counts="sample")
    if name in STATE:
        return Where(state=name)
    if name in OUTPUTS:
        return Where(output=name)
    return Where(scratch=name) if name in SCRATCH else Where(input=INPUTS[name])
