"""The table of LoRA adapters that compiled steps read."""

from __future__ import annotations

import ctypes

from inferc.runtime.adapters.arrange import ArrangedAdapter
from inferc.runtime.adapters.store import MOST_ADAPTERS
from inferc.runtime.runners.cpu import abi


class AdapterTable:
    """The structs of the adapters by their numbers, and the matrices that they point to; number 0 is never read."""

    def __init__(self) -> None:
        self._table = (abi.InfercAdapter * (MOST_ADAPTERS + 1))()
        self._kept: dict[int, ArrangedAdapter] = {}
        self.address = ctypes.addressof(self._table)

    def set(self, number: int, adapter: ArrangedAdapter | None) -> None:
        """Put an adapter at a number, or nothing; no step that reads it may be running."""
        if adapter is None:
            self._kept.pop(number, None)
            self._table[number] = abi.InfercAdapter()
            return
        self._kept[number] = adapter
        arrays = (adapter.data, adapter.down, adapter.up, adapter.ranks)
        self._table[number] = abi.InfercAdapter(*(each.ctypes.data for each in arrays))
