"""The matrix kernels beside oneDNN's, which multiply the same numbers, and every way to cut their products."""

import blocking
import gemm_onednn
import pytest

from inferc.codegen.cpp.build import ISAS
from inferc.runtime.runners.cpu.abi import choose_isa


@pytest.fixture(scope="module")
def ours() -> gemm_onednn.Ours:
    return gemm_onednn.Ours(choose_isa("auto", ISAS), 2)


@pytest.mark.slow
def test_both_give_the_same_product(ours: gemm_onednn.Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_onednn, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(gemm_onednn, "COUNTED_SECONDS", 0.01)
    made = gemm_onednn.product(ours, "w8a8", 40, 64, 512, weight_bytes=2 * 64 * 512)
    gemm_onednn.check(made)
    assert made.ours(3).shape == made.theirs(3).shape == (40, 64) and made.operations == 2 * 40 * 64 * 512
    rates = gemm_onednn.compare(made, turns=2)
    assert all(len(each) == 2 and min(each) > 0 for each in rates.values())


@pytest.mark.slow
def test_every_way_to_cut_a_product_is_measured(ours: gemm_onednn.Ours, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocking, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(blocking, "COUNTED_SECONDS", 0.002)
    found = blocking.measure(ours, "bfloat16", 70, 96, 640, turns=1, peak=1e13)
    chosen, best = (", ".join(map(str, found[each].values())) for each in ("chosen", "best"))
    shares = {cut: float(share.split()[1]) for cut, share in found["candidates"].items()}
    assert len(shares) > 2 and {chosen, best} <= set(shares) and shares[best] == max(shares.values())
    assert 0 < found["of_best"] <= 1 and 0 < found["expected"] < 1


@pytest.mark.slow
def test_another_product_is_refused(ours: gemm_onednn.Ours) -> None:
    made, other = (gemm_onednn.product(ours, "w8a8", 8, 32, k, weight_bytes=1) for k in (64, 128))
    with pytest.raises(RuntimeError, match="expected at most 0.01"):
        gemm_onednn.check(gemm_onednn.Product(made.ours, other.theirs, made.operations))


def test_rows_lie_as_in_the_arena() -> None:
    assert [gemm_onednn.stride(width, 2) for width in (256, 250, 1024)] == [288, 250, 1056]
    assert gemm_onednn.stride(1024, 1) == 1088
