"""KV events over ZeroMQ, in the form that vLLM's publisher gave them and routers for it read.

PUB: three frames, (topic, sequence as 8 bytes big-endian, msgpack of [time, events, data-parallel rank]); an event is an
array that begins with its name. ROUTER, for who missed some: asked (empty, first sequence), it answers (empty, topic,
sequence, msgpack) for each batch that is kept from there on, then (empty, empty, -1, empty).
"""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import zmq

from inferc.errors import ConfigError
from inferc.runtime.kv_cache.events import CacheEvent, KvBatch, Removed, Stored
from inferc.serve.errors import BatchesGone
from inferc.serve.kv_events.log import NUM_KEPT, READ_AT_ONCE, KvEventLog, KvPublisherConfig, Numbered, block_number

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
RANK = 0  # data-parallel; a server has one scheduler
SEND_QUEUE = 1000  # batches to a subscriber that does not read; it misses what comes beyond
LINGER_MS = 500  # for the last batch to leave


class KvPublisher:
    """Publishes what is in `events`, on a thread of its own, from `start` on.

    The addresses are taken at once, so that what is wrong with them is known before a model is loaded. Raises ConfigError.
    """

    def __init__(self, config: KvPublisherConfig, events: KvEventLog) -> None:
        self._topic, self._events = config.topic.encode(), events
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._woken, self._wake_end = os.pipe()
        for end in (self._woken, self._wake_end):
            os.set_blocking(end, False)
        try:
            self._pub = self._bind(zmq.PUB, config.endpoint, SEND_QUEUE)
            # Two whole answers fit: a ROUTER drops what a client's queue has no room for.
            self._router = None if config.replay is None else self._bind(zmq.ROUTER, config.replay, 2 * NUM_KEPT)
        except ConfigError:
            self._free()
            raise
        self._next = 0  # to be published
        self._asked: tuple[bytes, int, int] | None = None  # by whom, and which [start, end) are left to replay
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="inferc-kv-events", daemon=True)

    def _bind(self, kind: int, endpoint: str, queue: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, queue)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.IPV6, int("[" in endpoint))
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot listen for KV event subscribers on {endpoint}: {error.strerror}; another process may have the"
                " port, or the address is not this machine's"
            ) from None
        address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        log.info("KV events are %s on %s", "published" if kind == zmq.PUB else "replayed", address)
        return socket

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Publish what is left, and let go of the addresses."""
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._free()

    def _free(self) -> None:
        self._context.destroy()
        for end in (self._woken, self._wake_end):
            os.close(end)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full: it wakes up anyway
            os.write(self._wake_end, b"x")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        with self._events.listening(self._wake):
            is_behind = True  # what was added before this listened
            while not self._stopping or is_behind:
                ready = dict(poller.poll(0 if is_behind or self._asked else None))
                if self._woken in ready:
                    os.read(self._woken, 4096)
                is_behind = self._publish()
                if self._asked is not None:
                    self._replay(*self._asked)
                elif self._router in ready:
                    self._asked = self._request()

    def _publish(self) -> bool:
        """Publish some batches; whether there may be more."""
        try:
            batches = self._events.read(self._next)
        except BatchesGone:  # subscribers see the gap in the numbers
            log.warning("KV events were lost: they came faster than they could be published")
            self._next = self._events.first
            return True
        for numbered in batches:
            self._pub.send_multipart((self._topic, *_frames(numbered)))
        self._next += len(batches)
        return bool(batches)

    def _request(self) -> tuple[bytes, int, int] | None:
        assert self._router is not None
        frames = self._router.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            log.warning("a request for KV events is none: expected an empty frame and one of 8 bytes")
            return None
        return frames[0], int.from_bytes(frames[2], "big"), self._next

    def _replay(self, client: bytes, start: int, end: int) -> None:
        """A part of an answer, so that what is new waits for little; it begins with the first that is kept."""
        assert self._router is not None
        start = max(start, self._events.first)
        if start >= end:
            self._router.send_multipart((client, b"", b"", END, b""))
            self._asked = None
            return
        with suppress(BatchesGone):  # they went just now: go on with those behind
            for numbered in self._events.read(start, min(READ_AT_ONCE, end - start)):
                self._router.send_multipart((client, b"", self._topic, *_frames(numbered)))
                start = numbered.sequence + 1
        self._asked = client, start, end


def _frames(numbered: Numbered) -> tuple[bytes, bytes]:
    return numbered.sequence.to_bytes(8, "big"), encode(numbered.batch)


def encode(batch: KvBatch) -> bytes:
    """A batch as subscribers of vLLM's publisher decode it."""
    return msgspec.msgpack.encode((batch.time, [_event(event) for event in batch.events], RANK))


def _event(event: CacheEvent) -> tuple[Any, ...]:
    """An event's name, then its fields in their order; those that no router needs from us are None."""
    if isinstance(event, Stored):
        hashes = [block_number(name) for name in event.names]
        parent = None if event.parent is None else block_number(event.parent)
        ids = np.frombuffer(event.token_ids, "<i4").tolist()
        # The salt is a key of the first block; those behind have it by their parent.
        keys = [[event.salt], *[None] * (len(hashes) - 1)] if event.salt and parent is None else None
        lora_id = lora_name = None
        return "BlockStored", hashes, parent, ids, event.block_size, lora_id, event.medium, lora_name, keys
    if isinstance(event, Removed):
        return "BlockRemoved", [block_number(name) for name in event.names], event.medium
    return ("AllBlocksCleared",)
