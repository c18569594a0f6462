"""The origin of each element of a rearranged weight, compared with what the expressions themselves compute."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from inferc.ir import weights as weight_lib
from inferc.ir.weights import Weight
from inferc.passes.adapters.add_adapters import runs
from inferc.passes.adapters.follow import follow

Q = weight_lib.source("q", (12, 8), torch.float32)
K = weight_lib.source("k", (4, 8), torch.float32)


class Reader:
    """A reader of tensors whose elements are all different."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return VALUES[name][start:stop]


VALUES = {"q": torch.arange(1.0, 97.0).view(12, 8), "k": torch.arange(101.0, 133.0).view(4, 8)}


def _heads(weight: Weight, size: int) -> Weight:
    """Pad three heads of four outputs."""
    heads = weight_lib.reshape(weight, (3, 4, 8))
    return weight_lib.reshape(weight_lib.padded(heads, 1, size), (3 * size, 8))


def _columns(weight: Weight) -> Weight:
    """Pad two heads of four inputs."""
    heads = weight_lib.reshape(weight, (12, 2, 4))
    return weight_lib.reshape(weight_lib.padded(heads, 2, 6), (12, 12))


def _interleaved(weight: Weight) -> Weight:
    """Reorder [3 heads of (2, 2)] outputs to two runs of heads."""
    split = weight_lib.reshape(weight, (3, 2, 2, 8))
    return weight_lib.reshape(weight_lib.permute(split, (1, 0, 2, 3)), (12, 8))


CASES = {
    "as it is": Q,
    "in another dtype": weight_lib.cast(Q, torch.bfloat16),
    "transposed": weight_lib.permute(Q, (1, 0)),
    "cut": weight_lib.slice_(weight_lib.slice_(Q, 0, 2, 9), 1, 1, 5),
    "padded heads": _heads(Q, 6),
    "padded columns": _columns(Q),
    "reordered": _interleaved(Q),
    "packed": weight_lib.concat((Q, K)),
    "packed and padded": weight_lib.concat((_heads(Q, 5), weight_lib.slice_(Q, 0, 4, 8), K)),
    "transposed, then padded": weight_lib.padded(weight_lib.permute(K, (1, 0)), 0, 11),
}


@pytest.mark.parametrize("name", CASES)
def test_every_element_is_where_it_is_said_to_come_from(name: str) -> None:
    weight = CASES[name]
    whole = weight_lib.read_whole(weight, Reader()).float()
    parts = follow(weight)
    assert [begin for begin, _, _ in parts] == [0, *(end for _, end, _ in parts[:-1])]
    assert parts[-1][1] == weight.shape[0]
    for begin, end, part in parts:
        if part is None:  # rows of zeros, to which nothing is added
            assert not whole[begin:end].any()
            continue
        stored = VALUES[part.source].T if part.is_transposed else VALUES[part.source]
        outputs, inputs = torch.tensor(part.outputs), torch.tensor(part.inputs)
        found = stored[outputs.clamp(min=0)][:, inputs.clamp(min=0)]
        found = found * (outputs >= 0)[:, None] * (inputs >= 0)
        torch.testing.assert_close(found.to(weight.dtype).float(), whole[begin:end])


@pytest.mark.parametrize(
    "weight",
    [
        weight_lib.elementwise((Q, Q), "x0 + x1", torch.float32),
        weight_lib.concat((Q, weight_lib.source("o", (12, 3), torch.float32)), 1),
        weight_lib.reshape(Q, (24, 4)),
        weight_lib.constant(torch.zeros(2, 2)),
    ],
)
def test_what_is_computed_from_several_elements_is_not_followed(weight: Weight) -> None:
    assert [part for _, _, part in follow(weight)] == [None]


def test_runs_are_as_short_as_can_be() -> None:
    assert runs(range(5), 5) is None
    assert [tuple(map(int, (run.first, run.count, run.step))) for run in runs([3, 2, 1, -1, -1, 7], 8) or ()] == [
        (3, 3, -1),
        (-1, 2, 0),
        (7, 1, 1),
    ]
