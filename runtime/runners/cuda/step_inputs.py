"""The transfer of a step's inputs to the GPU: the plan, its lists of token ids, and which sequences share a prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ctypes import c_void_p
from typing import Any

import numpy as np

from inferc.arena import LINE_BYTES, round_up
from inferc.runtime.runners.cuda.capacity import Capacity, capacity_for
from inferc.runtime.runners.cuda.device_memory import DeviceMemory
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.input_layout import LISTS, InputLayout
from inferc.runtime.runners.cuda.shared_prefixes import shared_prefixes
from inferc.runtime.runners.cuda.step_buffers import StepBuffers
from inferc.runtime.step.plan import I32, StepPlan, TokenLists

LEAST_LISTS_BYTES = 1 << 16


class StepInputs:
    """The memory on the device that steps read their inputs from, and the copies that fill it.

    address: where the inputs lie. sharing: the arguments of `shared_prefixes` by KV group, for the groups whose shared
    prefixes are read once for several sequences. has_rows: steps keep rows for a head, or read such rows.
    """

    def __init__(
        self,
        driver: Driver,
        stream: c_void_p,
        device: DeviceMemory,
        most: Capacity,
        sample_rows: int,
        max_blocks: Sequence[int],
        sharing: Mapping[int, tuple[int, int, int, int]],
        *,
        has_rows: bool = False,
    ) -> None:
        self._driver, self._stream, self._device = driver, stream, device
        self._sample_rows, self._max_blocks, self.sharing = sample_rows, max_blocks, sharing
        self._has_rows = has_rows
        self._layouts: dict[Capacity, InputLayout] = {}
        self.num_bytes = self.layout(most).num_bytes
        self.address = device.new(self.num_bytes, zero=True)  # zeroed because engines run once before the first step
        self._lists, self._lists_bytes = device.new(LEAST_LISTS_BYTES), LEAST_LISTS_BYTES

    def layout(self, capacity: Capacity) -> InputLayout:
        """Return where each input lies in steps of this capacity."""
        if capacity not in self._layouts:
            self._layouts[capacity] = InputLayout(
                capacity, self._sample_rows, self._max_blocks, has_rows=self._has_rows
            )
        return self._layouts[capacity]

    def send(self, plan: StepPlan, buffers: StepBuffers, capacity: Capacity, more: Mapping[str, I32]) -> bool:
        """Write the plan and copy it to the device. more: inputs that are not in the plan, by name.

        Return whether sequences share a prefix that is read once for them.
        """
        prefixes = {}
        for group, settings in self.sharing.items():
            found = shared_prefixes(plan, group, *settings)
            if found is not None:
                prefixes[group] = found
        layout = self.layout(capacity)
        if capacity not in buffers.views:
            buffers.views[capacity] = layout.views(buffers.inputs)
        views = buffers.views[capacity]
        copies = layout.write(plan, views, prefixes)
        views["lists"][:] = self._send_lists(plan, buffers)
        for name, values in more.items():
            views[name][: len(values)] = values
        start = buffers.inputs.ctypes.data
        for offset, size in copies:
            if size:
                self._driver.copy_in(self.address + offset, start + offset, size, self._stream)
        return bool(prefixes)

    def _send_lists(self, plan: StepPlan, buffers: StepBuffers) -> list[int]:
        """Copy the ids of bias, banned and allowed tokens, and the values of bias; return their addresses."""
        lists: list[TokenLists] = [getattr(plan.sample, name) for name in LISTS]
        bias, banned, allowed = lists
        arrays: list[Any] = [bias.token_ids, bias.values, banned.token_ids, allowed.token_ids]
        if not any(map(len, arrays)):
            return [self._lists] * 4
        sizes = [round_up(array.nbytes, LINE_BYTES) for array in arrays]
        if sum(sizes) > self._lists_bytes:
            num_bytes = capacity_for(sum(sizes))
            larger = self._device.new(num_bytes)
            self._driver.wait(self._stream)  # steps in flight read the old lists
            self._device.free(self._lists)
            self._lists, self._lists_bytes = larger, num_bytes
        if buffers.lists is None or len(buffers.lists) < sum(sizes):
            larger_here = self._driver.allocate_host(self._lists_bytes)
            if buffers.lists is not None:
                self._driver.free_host(buffers.lists)
            buffers.lists = larger_here
        joined, addresses, at = buffers.lists, [], 0
        for array, size in zip(arrays, sizes, strict=True):
            joined[at : at + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
            addresses.append(self._lists + at)
            at += size
        self._driver.copy_in(self._lists, joined.ctypes.data, at, self._stream)
        return addresses
