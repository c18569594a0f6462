"""The penalty counts on a GPU: by slot, whether the prompt contains each token, and how often the output does."""

from __future__ import annotations

from ctypes import c_void_p

import numpy as np

from inferc.arena import align_rows
from inferc.runtime.runners.cuda.device_memory import DeviceMemory
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.staging import Staging
from inferc.runtime.step.plan import I32

COUNT_BUFFERS = 4  # how many sequences with penalties may join before one waits for a copy of counts
COUNT_OF_PROMPT = np.uint32(1 << 31)


class PenaltyCounts:
    """The penalty counts of all slots.

    table: the address of an array that kernels read, with a pointer per slot; 0 where a sequence has no penalties.
    """

    def __init__(
        self, driver: Driver, stream: c_void_p, memory: DeviceMemory, table: int, vocab_size: int, max_num_seqs: int
    ) -> None:
        self._driver, self._stream, self._table = driver, stream, table
        self._slot_bytes = 4 * align_rows(vocab_size)
        self._counts = memory.new(self._slot_bytes * max_num_seqs)
        self._counted: set[int] = set()  # the slots whose sequences have penalties
        self._staging = Staging(driver, stream, 8 + 4 * vocab_size, COUNT_BUFFERS)

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        """Assign `slot` to a new sequence: start its counts from these ids (None: it has no penalties)."""
        if prompt_ids is None and slot not in self._counted:
            return
        address = 0 if prompt_ids is None else self._counts + self._slot_bytes * slot
        (self._counted.discard if prompt_ids is None else self._counted.add)(slot)
        with self._staging.buffer() as staged:
            staged[:8].view(np.uint64)[0] = address
            if prompt_ids is not None:
                counts = staged[8:].view(np.uint32)
                counts[:] = 0
                if output_ids is not None:
                    np.add.at(counts, output_ids, 1)
                counts[prompt_ids] |= COUNT_OF_PROMPT
                self._driver.copy_in(address, counts.ctypes.data, counts.nbytes, self._stream)
            self._driver.copy_in(self._table + 8 * slot, staged.ctypes.data, 8, self._stream)

    def close(self) -> None:
        self._staging.close()
