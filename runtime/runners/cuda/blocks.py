"""The transfer of K and V between a GPU and its host: whole blocks, in the device's layout or in canonical form.

On the device, one head's part of a block is contiguous, [k, v][block_size][head_dim]; in int8 the float32 scales of its
rows follow the rows. The canonical form has the axes [layers, 2, block_size, num_kv_heads, head_dim], each row with its
scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.kv_groups import SCALE_BYTES, num_parts
from inferc.manifest_types import KvGroup
from inferc.runtime.artifact.numpy_dtypes import NUMPY_DTYPES
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.staging import Staging
from inferc.runtime.step.plan import I32, I64, Copies


class Blocks:
    """The access to the blocks of all KV groups on the device.

    groups: their entries in the manifest; pools: the device addresses of their pools.
    """

    def __init__(
        self,
        driver: Driver,
        stream: c_void_p,
        groups: Sequence[KvGroup],
        pools: Sequence[int],
        block_size: int,
    ) -> None:
        self._driver, self._stream = driver, stream
        self._groups, self._pools, self._block_size = groups, pools, block_size
        self._staging = Staging(driver, stream, max(map(self._block_bytes, range(len(groups)))), count=2)

    def copy_slots(self, group: int, source: I64, target: I64) -> None:
        """Copy K and V between slots, in order, in every layer."""
        blocks, index = np.unique(np.stack((source, target)) // self._block_size, return_inverse=True)
        held = self.pack(group, blocks.astype(np.int32))
        from_block, to_block = index.reshape(2, -1)
        from_offset, to_offset = np.stack((source, target)) % self._block_size
        for i in range(len(source)):
            held[to_block[i], :, :, to_offset[i]] = held[from_block[i], :, :, from_offset[i]]
        self.unpack(group, blocks.astype(np.int32), held)

    def share(self, copies: Sequence[Copies]) -> None:
        """Copy slots from the beginning of one block to that of another, per group, on the device.

        The copies go to the stream, ahead of what it is given next. Each copies a whole block in one piece: no sequence
        reads what lies after the copied slots before it is computed.
        """
        for group, each in enumerate(copies):
            size, pool = self._block_bytes(group), self._pools[group]
            pairs = np.stack((each.source, each.target)) // self._block_size
            starts = np.append(True, (np.diff(pairs) != 0).any(axis=0))
            for source, target in pairs[:, starts].T.tolist() if len(each.source) else ():
                self._driver.copy_on_device(pool + target * size, pool + source * size, size, self._stream)

    def pack(self, group: int, blocks: I32) -> NDArray[Any]:
        """Read blocks and return them in canonical form."""
        of = self._groups[group]
        parts = (len(of.layers), of.num_kv_heads, num_parts(of.kind))
        size, pool = self._block_bytes(group), self._pools[group]
        raw = np.zeros((len(blocks), size), np.uint8)
        for index, block in enumerate(blocks.tolist()):
            with self._staging.buffer() as staged:
                self._driver.copy_out(staged.ctypes.data, pool + block * size, size, self._stream)
                self._driver.wait(self._stream)
                raw[index] = staged[:size]
        pieces = raw.reshape(len(blocks), *parts, -1)
        if of.dtype == "int8":
            values = pieces[..., : self._block_size * of.head_dim].reshape(*pieces.shape[:-1], self._block_size, -1)
            scales = pieces[..., -self._block_size * SCALE_BYTES :].reshape(*pieces.shape[:-1], self._block_size, -1)
            pieces = np.concatenate((values, scales), -1)
        rows = pieces.reshape(len(blocks), *parts, self._block_size, -1).view(NUMPY_DTYPES[of.dtype])
        return np.ascontiguousarray(rows.transpose(0, 1, 3, 4, 2, 5))

    def unpack(self, group: int, blocks: I32, canonical: NDArray[Any]) -> None:
        """Write blocks from their canonical form."""
        of = self._groups[group]
        rows = np.ascontiguousarray(canonical.transpose(0, 1, 4, 2, 3, 5)).view(np.uint8)
        if of.dtype == "int8":
            dim = of.head_dim
            pieces = (rows[..., :dim], rows[..., dim:])
            rows = np.concatenate([each.reshape(*each.shape[:-2], -1) for each in pieces], -1)
        raw = np.ascontiguousarray(rows).reshape(len(blocks), -1)
        size, pool = self._block_bytes(group), self._pools[group]
        for index, block in enumerate(blocks.tolist()):
            with self._staging.buffer() as staged:
                staged[:size] = raw[index]
                self._driver.copy_in(pool + block * size, staged.ctypes.data, size, self._stream)

    def close(self) -> None:
        """Free the memory that copies are staged in."""
        self._staging.close()

    def _block_bytes(self, group: int) -> int:
        return self._block_size * self._groups[group].bytes_per_token
