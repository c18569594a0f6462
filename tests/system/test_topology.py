"""Cores and nodes as the kernel lists them; where memory goes and threads stay, as the kernel tells of threads."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from inferc.config import EngineConfig
from inferc.errors import ConfigError
from inferc.kv_groups import CacheGroup
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.system.topology import Core, cores_to_pin, memory_on, nodes_of, read_cores

needs_nodes = pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without nodes of memory")


def system(folder: Path, siblings: dict[int, str], nodes: dict[int, str]) -> Path:
    """Return a folder with what the kernel says under /sys/devices/system."""
    for cpu, text in siblings.items():
        (folder / f"cpu/cpu{cpu}/topology").mkdir(parents=True)
        (folder / f"cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{text}\n")
    for node, text in nodes.items():
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(f"{text}\n")
    if nodes:
        (folder / "node/online").write_text(",".join(map(str, nodes)) + "\n")
    return folder


def test_two_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    made = system(tmp_path, {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}, {0: "0-5"})
    assert read_cores(made, (0, 1, 4, 5)) == (Core((0, 4), 0), Core((1, 5), 0))
    assert read_cores(made, (1, 4, 5)) == (Core((1, 5), 0), Core((4,), 0)), "what is not allowed is not there"
    assert nodes_of(read_cores(made, (0, 1)), made) == (), "one node: nothing to choose"


def test_cores_of_a_node_lie_together(tmp_path: Path) -> None:
    siblings = {cpu: str(cpu) for cpu in range(8)}
    made = system(tmp_path, siblings, {0: "0-1,4-5", 1: "2-3,6-7"})
    cores = read_cores(made, range(8))
    assert [(core.cpus[0], core.node) for core in cores] == [
        *[(cpu, 0) for cpu in (0, 1, 4, 5)],
        *[(cpu, 1) for cpu in (2, 3, 6, 7)],
    ]
    assert nodes_of(cores, made) == (0, 1) and nodes_of(cores[4:], made) == (1,)


def test_a_kernel_that_says_nothing_has_a_core_for_each_processor(tmp_path: Path) -> None:
    assert read_cores(tmp_path, (0, 3)) == (Core((0,), 0), Core((3,), 0))
    assert nodes_of(read_cores(tmp_path, (0, 3)), tmp_path) == ()


def test_pinning_takes_a_core_for_each_thread() -> None:
    mine = read_cores()
    assert cores_to_pin(1) == mine[:1]
    for count, first in ((len(mine) + 1, 0), (1, len(mine))):
        with pytest.raises(
            ConfigError, match=rf"{len(mine) + 1} threads to pin, but this process may use {len(mine)} cores"
        ):
            cores_to_pin(count, first)
    with pytest.raises(ConfigError, match="lower --threads, or leave --pin out"):
        EngineConfig(num_threads=len(mine) + 1, pin_threads=True).resolve(100, 16, (CacheGroup(1000),))


def allowed_of_threads() -> dict[int, frozenset[int]]:
    return {int(task): frozenset(os.sched_getaffinity(int(task))) for task in os.listdir("/proc/self/task")}


@pytest.mark.skipif(len(read_cores()) < 2, reason="needs two cores")
@pytest.mark.parametrize("pin", [False, True])
def test_threads_stay_on_cores_of_their_own(tiny_artifact: Path, pin: bool) -> None:
    before = allowed_of_threads()
    config = EngineConfig(num_threads=2, max_num_seqs=2, kv_memory_bytes=1 << 20, pin_threads=pin)
    runner = CpuRunner(load_artifact(tiny_artifact), config, first_core=0)
    try:
        runner.reset_slot(0, None)  # the worker has begun when it has done something
        new = [cpus for task, cpus in allowed_of_threads().items() if task not in before]
        mine = [frozenset(core.cpus[:1]) for core in read_cores()[:2]]
        assert sorted(new, key=min) == mine if pin else set(new) == {frozenset(os.sched_getaffinity(0))}
    finally:
        runner.close()
    assert allowed_of_threads().items() <= before.items(), "the caller stays where it may run"


def policies() -> set[str]:
    """Return the memory policies of this thread's mappings."""
    text = Path(f"/proc/self/task/{threading.get_native_id()}/numa_maps").read_text()
    return {line.split()[1] for line in text.splitlines()}


@needs_nodes
def test_memory_is_shared_out_over_nodes_by_threads_that_are_started_meanwhile() -> None:
    before, seen = policies(), list[set[str]]()
    with memory_on((0,)):
        thread = threading.Thread(target=lambda: seen.append(policies()))
        thread.start()
        seen.append(policies())
    thread.join()
    assert all("interleave:0" in each - before for each in seen) and policies() == before
    with memory_on(()):
        assert policies() == before


def test_a_node_that_is_not_there_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with memory_on((1000,)):
        pass
    assert "memory is not shared out over nodes (1000,): " in caplog.text
