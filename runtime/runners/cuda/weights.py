"""The copy of an artifact's weights to a GPU: threads read the mapped files into pinned memory for the device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from mmap import mmap

import numpy as np

from inferc.arena import ENGINE_ALIGNMENT, round_up
from inferc.manifest_types import StoredWeight
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.cuda.driver import Driver

PIECE_BYTES = 16 << 20
NUM_THREADS = 4


def copy_weights(
    weights: Sequence[StoredWeight], maps: Mapping[str, mmap], driver: Driver, base: int
) -> dict[str, int]:
    """Copy the tensors of a weight table to `base` and on, in the order of their files; return their addresses by name.

    Returns once all tensors are on the device. Names that share a tensor share its copy.
    """
    places: dict[tuple[str, int], tuple[int, int]] = {}  # (file, offset) -> (address, bytes)
    at = base
    for weight in sorted(weights, key=lambda each: (each.file, each.offset)):
        if (weight.file, weight.offset) not in places:
            places[weight.file, weight.offset] = (at, weight.num_bytes)
            at += round_up(weight.num_bytes, ENGINE_ALIGNMENT)
    pieces: queue.SimpleQueue[tuple[str, int, int, int]] = queue.SimpleQueue()
    for (file, offset), (address, num_bytes) in places.items():
        for start in range(0, num_bytes, PIECE_BYTES):
            pieces.put((file, offset + start, address + start, min(PIECE_BYTES, num_bytes - start)))
    errors: list[BaseException] = []

    def work() -> None:
        try:
            driver.enter()
            own = driver.new_stream()
            staged = [(driver.allocate_host(PIECE_BYTES), driver.new_event()) for _ in range(2)]
            turn = 0
            while not errors:
                try:
                    file, offset, address, num_bytes = pieces.get_nowait()
                except queue.Empty:
                    break
                memory, event = staged[turn % 2]
                driver.wait_event(event)
                np.copyto(memory[:num_bytes], np.frombuffer(maps[file], np.uint8, num_bytes, offset))
                driver.copy_in(address, memory.ctypes.data, num_bytes, own)
                driver.record(event, own)
                turn += 1
            driver.wait(own)
            for memory, event in staged:
                driver.free_host(memory)
                driver.call("cuEventDestroy_v2", event)
            driver.call("cuStreamDestroy_v2", own)
        except BaseException as error:  # noqa: BLE001  (raised again by who waits)
            errors.append(error)

    threads = [threading.Thread(target=work, name=f"weights-{index}", daemon=True) for index in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {weight.name: places[weight.file, weight.offset][0] for weight in weights}


def placer(artifact: Artifact) -> Callable[[Driver, int], dict[str, int]]:
    """Return a function that copies the artifact's weights to a GPU, as `copy_weights` does."""
    return partial(copy_weights, artifact.weights, artifact.maps)


def placed_bytes(weights: Sequence[StoredWeight]) -> int:
    """Return the number of bytes that `copy_weights` fills."""
    sizes = {(weight.file, weight.offset): weight.num_bytes for weight in weights}
    return sum(round_up(size, ENGINE_ALIGNMENT) for size in sizes.values())
