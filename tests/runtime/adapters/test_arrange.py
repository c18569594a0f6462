"""The arranging of an adapter's matrices: where each lies, and what an artifact refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from inferc.errors import UnsupportedError
from inferc.ir.adapter_sites import Adapters, AdapterSite, IndexRun
from inferc.runtime.adapters.arrange import arrange
from inferc.runtime.adapters.peft import LowRank, PeftAdapter
from inferc.runtime.artifact.numpy_dtypes import widened

SITES = [
    AdapterSite("embedding", "model.embed", None, [10, 6], 10, 6),
    # Six stored outputs, of which two of each three are taken, and padding; inputs in reverse.
    AdapterSite(
        "linear",
        "model.layers.0.q",
        0,
        [6, 4],
        6,
        4,
        0,
        [IndexRun(0, 2, 1), IndexRun(-1, 1, 0), IndexRun(3, 2, 1), IndexRun(-1, 1, 0)],
        [IndexRun(3, 4, -1)],
    ),
    AdapterSite("linear", "model.layers.0.v", 0, [3, 4], 3, 4),
]
ROOM = Adapters(4, SITES)


def _adapter(**modules: LowRank) -> PeftAdapter:
    return PeftAdapter(Path("own"), {name.replace("__", "."): each for name, each in modules.items()}, "")


def _low_rank(rank: int, inputs: int, outputs: int, is_embedding: bool = False) -> LowRank:
    rng = np.random.default_rng(rank)
    a, b = rng.normal(size=(rank, inputs)), rng.normal(size=(outputs, rank))
    return LowRank(a.astype(np.float32), b.astype(np.float32), is_embedding)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_each_matrix_lies_aligned_as_the_step_reads_it(dtype: str) -> None:
    q, embed = _low_rank(3, 4, 6), _low_rank(2, 10, 6, True)
    found = arrange(_adapter(layers__0__q=q, model__embed=embed), ROOM, dtype)
    assert found.ranks.tolist() == [2, 3, 0]
    assert found.data.ctypes.data % 64 == 0
    assert all(each * found.data.itemsize % 64 == 0 for each in (*found.down.tolist(), *found.up.tolist()))
    data = widened(found.data) if dtype == "bfloat16" else found.data
    near = {"rtol": 2**-8} if dtype == "bfloat16" else {"rtol": 0}
    np.testing.assert_allclose(data[found.down[0] :][:20].reshape(10, 2), embed.a.T, **near)
    np.testing.assert_allclose(data[found.up[0] :][:12].reshape(2, 6), embed.b.T, **near)
    np.testing.assert_allclose(data[found.down[1] :][:12].reshape(3, 4), q.a[:, ::-1], **near)
    b = np.zeros((6, 3), np.float32)
    b[[0, 1, 3, 4]] = q.b[[0, 1, 3, 4]]
    np.testing.assert_allclose(data[found.up[1] :][:18].reshape(3, 6), b.T, **near)


def test_a_copy_of_the_models_matrix_must_have_its_shape() -> None:
    embed = _low_rank(2, 10, 6, True)
    same, other = (PeftAdapter(Path("own"), {"model.embed": embed}, "", {"model.embed": (n, 6)}) for n in (10, 12))
    assert arrange(same, ROOM, "float32").ranks.tolist() == [2, 0, 0]
    with pytest.raises(UnsupportedError, match=r"as \[12, 6\], and the artifact's is \[10, 6\]: the vocabulary was"):
        arrange(other, ROOM, "float32")


@pytest.mark.parametrize(
    ("modules", "told"),
    [
        ({"layers__0__o": _low_rank(2, 4, 6)}, "layers.0.o: the artifact has no place for an adapter there; it has"),
        ({"layers__0__q": _low_rank(2, 5, 6)}, "from 5 to 6 features, and the artifact has 4 to 6 there: the adapter"),
        ({"layers__0__q": _low_rank(5, 4, 6)}, "rank 5, and the artifact has room for rank 4; compile the model again"),
        ({"layers__0__q": _low_rank(2, 4, 6, True)}, "made for another kind of layer"),
        ({"embed": _low_rank(2, 11, 6, True)}, "from 11 to 6 features, and the artifact has 10 to 6"),
    ],
)
def test_an_adapter_of_another_model_or_rank_is_refused(modules: dict[str, LowRank], told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        arrange(_adapter(**modules), ROOM, "float32")


def test_two_modules_for_one_place_are_refused() -> None:
    """The names of one end in the name of the other: a vision tower's layers beside those of the text model."""
    both = _adapter(layers__0__v=_low_rank(2, 4, 3), vision__model__layers__0__v=_low_rank(2, 4, 3))
    with pytest.raises(UnsupportedError, match="vision.model.layers.0.v: another module of this file is model.layers"):
        arrange(both, ROOM, "float32")
