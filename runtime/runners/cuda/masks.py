"""The masks of a step's rows: made on the host once the step before has sampled, and copied to the GPU."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_void_p

import numpy as np

from inferc.arena import mask_words
from inferc.runtime.runners.cuda.capacity import capacity_for
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.step_buffers import StepBuffers
from inferc.runtime.step.plan import U32, StepMasks

SendMasks = Callable[[int, int], None]  # (first row of a step, number of rows): copies their masks to the device


class MaskCopies:
    """The copies of masks to the device.

    address: where kernels read the masks of a step; there is room for one of each sequence, and for those of the rows
    that are sampled at a time. A step whose tokens were drafted may have more, so it gets them chunk by chunk.
    """

    def __init__(self, driver: Driver, stream: c_void_p, address: int, vocab_size: int, max_num_seqs: int) -> None:
        self._driver, self._stream, self._address = driver, stream, address
        self._words, self._max_num_seqs = mask_words(vocab_size), max_num_seqs
        self._last_ids = np.zeros(max_num_seqs, np.int32)  # by slot, kept only where masks need them

    def make(self, masks: StepMasks, step: StepBuffers, before: StepBuffers | None) -> SendMasks:
        """Have the masks of a step made, and return what sends them once they are.

        before: the step before it, if that is in flight.
        """
        if before is not None and before.error is None:
            assert not before.has_drafts, "a step whose tokens were drafted is waited for before the next is given"
            self._driver.wait_event(before.event)
            self._last_ids[before.slots] = before.token_ids
        masks.begin(self._last_ids)
        masks.wait()
        has_mask = masks.mask_rows >= 0
        rows = masks.mask_rows[has_mask]
        starts = np.append(0, np.cumsum(has_mask))
        held = self._held(step, len(rows))
        np.take(masks.bits, rows, axis=0, out=held, mode="clip")

        def send(first: int, count: int) -> None:
            sent = held[starts[first] : starts[first + count]]
            if len(sent):
                self._driver.copy_in(self._address, sent.ctypes.data, sent.nbytes, self._stream)

        return send

    def _held(self, step: StepBuffers, count: int) -> U32:
        """Return pinned memory of the step for so many masks."""
        if step.masks is None or len(step.masks) < count:
            room = self._max_num_seqs if count <= self._max_num_seqs else capacity_for(count)
            larger = self._driver.allocate_host(4 * self._words * room)
            if step.masks is not None:
                self._driver.free_host(step.masks.view(np.uint8))
            step.masks = larger.view(np.uint32).reshape(-1, self._words)
        return step.masks[:count]
