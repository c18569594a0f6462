"""The arena's layout, which C++ states once more."""

import re
from pathlib import Path

from inferc.arena import POOLS, ROW_ALIGNMENT, SAMPLE_ROWS, Arena, MemoryFormula, MostRows

HEADERS = Path(__file__).parents[1] / "codegen" / "cpp" / "kernels"


def test_cpp_states_the_same() -> None:
    abi, step = (HEADERS / "inferc_abi.h").read_text(), (HEADERS / "step.h").read_text()
    assert f"#define INFERC_SAMPLE_ROWS {SAMPLE_ROWS} " in abi
    assert re.search(rf"the maxima [^:]* each a multiple of {ROW_ALIGNMENT}: only these determine\s+// addresses", abi)
    order = re.search(r"i64 per_token, per_row, per_seq, per_sample;", step)
    assert order and POOLS == ("T", "S", "B", "sample")
    begins = re.findall(r"(\w+)_pool = (\w+)_pool \+ layout\.per_(\w+) \* a\.max_(\w+);", step)
    assert begins == [
        ("row", "token", "token", "tokens"),
        ("seq", "row", "row", "rows"),
        ("sample", "seq", "seq", "seqs"),
    ]


def test_pools_follow_one_another() -> None:
    arena, most = Arena({"T": 100, "S": 10, "B": 8, "sample": 4}), MostRows.of(65, 3, 64)
    assert (most.tokens, most.rows, most.seqs, most.sample) == (128, 64, 64, 64)
    assert [arena.address(pool, 0, most) for pool in POOLS] == [0, 12800, 13440, 13952]
    assert arena.address("S", 4, most) == 12800 + 4 * 64
    assert arena.num_bytes(most) == 13952 + 4 * 64
    assert arena.formula == MemoryFormula(const=256, per_token=100, per_row=10, per_seq=8, per_thread=0)
