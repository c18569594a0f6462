"""The number of threads that work, and that the work is whole whoever does it."""

from __future__ import annotations

import torch
from cpp_kernels import Kernels

SLICE = 40.0  # milliseconds of a region


def threads_after(kernels: Kernels, threads: int, regions: list[tuple[float, float]]) -> list[int]:
    """The threads after regions of (milliseconds, those that threads waited for a core), one behind the other."""
    lengths = torch.tensor([ms for ms, _ in regions], dtype=torch.float64)
    out = torch.zeros(len(regions), dtype=torch.int64)
    ends = 1e6 + lengths.cumsum(0)
    lost = torch.tensor([ms for _, ms in regions], dtype=torch.float64)
    kernels("test_roster", threads, ends, lengths, lost, len(regions), out)
    return out.tolist()


def test_a_thread_rests_while_another_process_takes_its_core(kernels: Kernels) -> None:
    quiet, crowded = (SLICE, 0.0), (SLICE, SLICE / 2)
    assert threads_after(kernels, 2, [quiet] * 20) == [2] * 20
    # Two in a row tell; 100 ms later all are tried again, then after 200, until nobody is there.
    found = threads_after(kernels, 2, [crowded] * 2 + [quiet] * 3 + [crowded] * 2 + [quiet] * 20)
    assert found == [2, 1, 1, 1, 2, 2, 1, 1, 1, 1, 1] + [2] * 16
    assert threads_after(kernels, 4, [crowded] * 7) == [4, 3, 3, 2, 4, 4, 3]


def test_single_slices_and_short_waits_are_no_neighbour(kernels: Kernels) -> None:
    assert threads_after(kernels, 2, [(SLICE, SLICE), (SLICE, 0.0)] * 10) == [2] * 20
    assert threads_after(kernels, 2, [(1.0, 0.9)] * 20) == [2] * 20  # the process's own other threads
    assert threads_after(kernels, 2, [(SLICE, SLICE / 6)] * 20) == [2] * 20
    assert threads_after(kernels, 1, [(SLICE, SLICE)] * 20) == [1] * 20


def test_a_thread_that_waits_for_others_has_not_lost_its_core(kernels: Kernels) -> None:
    """One of two threads computes, or sleeps in the host, for 50 ms; the other waits, and could not have gone on."""
    lost = torch.zeros(2, dtype=torch.float64)
    for by_host in (0, 1):
        kernels("test_waiting", kernels.threads, 50, by_host, lost)
        assert lost[1 - by_host :].max() < 25, lost  # who computes may lose its core to whatever else runs here


def test_any_number_of_the_threads_does_all_the_work(kernels: Kernels) -> None:
    handled, wrong = torch.zeros(50, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    kernels("test_regions", kernels.threads, 400, 50, handled, wrong)
    assert handled.tolist() == [400] * 50
    assert wrong.item() == 0


def test_a_pool_ends_while_threads_that_had_no_part_still_wake(kernels: Kernels) -> None:
    """Threads that wake late look at the signal of the end, which the thread sanitizer must see as no race."""
    come = torch.zeros(1, dtype=torch.int64)
    kernels("test_closing", 300, 4, come)
    assert come.item() == 300 * (1 + 2 + 3)
