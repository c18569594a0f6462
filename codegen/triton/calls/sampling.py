"""The launches around a step's own: filling in the ids sampled by the step before, sampling and scoring."""

from __future__ import annotations

from typing import Any

from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.kernels.sampling.choose import choose, list_stride
from inferc.codegen.triton.kernels.sampling.fill_late_ids import fill_late_ids
from inferc.codegen.triton.kernels.sampling.process_logits import apply_lists, penalize
from inferc.codegen.triton.kernels.sampling.report_logprobs import report_logprobs
from inferc.codegen.triton.kernels.sampling.row_parts import part_of, row_parts
from inferc.codegen.triton.kernels.sampling.score_rows import score_rows
from inferc.codegen.triton.kernels.sampling.search import PLACES

INPUTS = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "counters", "num_logprobs", "lists")},
    **{name: name for name in ("bias_starts", "banned_starts", "allowed_starts", "target_ids")},
    **{name: name for name in ("late_rows", "late_slots", "num_late")},
    "slots": "sampled_slots",
    "repetition": "repetition_penalty",
    "presence": "presence_penalty",
    "frequency": "frequency_penalty",
}
"""The kernels' arguments that are inputs of the step, and the names of these inputs."""
STATE = ("last_ids", "count_table")
OUTPUTS = ("token_ids", "logprobs", "ranks", "top_ids", "top_logprobs", "argmax")
SCRATCH = ("x", "tops", "first", "mass", "list_values", "list_ids")


def scratch(vocab: int) -> dict[str, dict[str, int]]:
    """Return the scratch memory besides the logits, by name: bytes for each row that is sampled at a time."""
    parts = -(-vocab // part_of(vocab))
    whole = 4 * list_stride(vocab)
    sizes = {
        **dict.fromkeys(("x", "list_values", "list_ids"), whole),
        "tops": 4 * parts * PLACES.value,
        **dict.fromkeys(("first", "mass"), 4 * parts),
    }
    return {name: {"per_row": size} for name, size in sizes.items()}


def sampling_launches(vocab: int, logits: dict[str, Any]) -> dict[str, list[tuple[str, str, Source, dict[str, Any]]]]:
    """Return the launches before a step ("begin"), after its logits ("sample"), and to score logits ("score").

    Each launch is (kernel, what rows it goes over, source, arguments). `logits` says where the logits lie, as an
    argument of `calls.Call`, and has the `stride` of their rows.
    """
    stride, x_stride = int(logits["stride"]), list_stride(vocab)
    at = {name: logits[name] for name in ("value", "offset", "column")}

    def made(name: str, source: Source) -> tuple[str, str, Source, dict[str, Any]]:
        return (name, "rows", source, {argument: _where(argument, at) for argument in source.signature})

    late = fill_late_ids()
    places = {argument: _where(argument, at) for argument in late.signature}
    return {
        "begin": [("fill_late_ids", "tokens", late, {**places, "token_ids_ptr": {"input": "token_ids"}})],
        "sample": [
            made("penalize", penalize(vocab, stride, x_stride)),
            made("apply_lists", apply_lists(stride, x_stride)),
            made("row_parts", row_parts(vocab, stride, x_stride)),
            made("choose", choose(vocab, stride, x_stride)),
            made("report_logprobs", report_logprobs(vocab, stride)),
        ],
        "score": [made("score_rows", score_rows(vocab, stride))],
    }


def _where(argument: str, logits: dict[str, Any]) -> dict[str, Any]:
    name = argument.removesuffix("_ptr")
    if name == "logits":
        return logits
    if name == "counts":
        return {"counts": "sample"}
    for kind, names in (("state", STATE), ("output", OUTPUTS), ("scratch", SCRATCH)):
        if name in names:
            return {kind: name}
    return {"input": INPUTS[name]}
