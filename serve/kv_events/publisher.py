"""The publisher of KV events over ZeroMQ, in the format of vLLM's publisher, which routers for vLLM read.

The PUB socket sends three frames: topic, sequence number (8 bytes, big-endian), and msgpack of [time, events,
data-parallel rank]. An event is an array that begins with its name. The ROUTER socket is for subscribers that missed
batches: to (empty, first sequence number) it answers (empty, topic, sequence number, msgpack) for each batch that is
kept from there on, then (empty, empty, -1, empty).
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
RANK = 0  # the data-parallel rank: a server has one scheduler
SEND_QUEUE = 1000  # batches queued for a subscriber that does not read; it misses further ones
LINGER_MS = 500  # time to send the last batch at the end


class KvPublisher:
    """The publisher of the batches in `events`, which runs on a thread of its own after `start`.

    The addresses are bound at once, so that an error is known before a model is loaded. Raises ConfigError.
    """

    def __init__(self, config: KvPublisherConfig, events: KvEventLog) -> None:
        self._topic, self._events = config.topic.encode(), events
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._woken, self._wake_end = os.pipe()
        for end in (self._woken, self._wake_end):
            os.set_blocking(end, False)
        try:
            self._pub = self._bind(zmq.PUB, config.endpoint, SEND_QUEUE)
            # The queue has room for two complete answers: a ROUTER drops messages when a client's queue is full.
            self._router = None if config.replay is None else self._bind(zmq.ROUTER, config.replay, 2 * NUM_KEPT)
        except ConfigError:
            self._free()
            raise
        self._next = 0  # number of the next batch to publish
        self._asked: tuple[bytes, int, int] | None = None  # replay in progress: client, and the rest [start, end)
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
        """Publish the remaining batches, and release the addresses."""
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
        with suppress(BlockingIOError):  # the pipe is full, so the thread wakes up anyway
            os.write(self._wake_end, b"x")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None:
            poller.register(self._router, zmq.POLLIN)
        with self._events.listening(self._wake):
            is_behind = True  # there may be batches from before this listened
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
        """Publish some batches, and return whether there may be more."""
        try:
            batches = self._events.read(self._next)
        except BatchesGone:  # subscribers notice the gap in the sequence numbers
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
        """Send a part of a replay, only a part so that new batches do not wait long; it skips batches not kept."""
        assert self._router is not None
        start = max(start, self._events.first)
        if start >= end:
            self._router.send_multipart((client, b"", b"", END, b""))
            self._asked = None
            return
        with suppress(BatchesGone):  # they were dropped just now: the next call goes on with later ones
            for numbered in self._events.read(start, min(READ_AT_ONCE, end - start)):
                self._router.send_multipart((client, b"", self._topic, *_frames(numbered)))
                start = numbered.sequence + 1
        self._asked = client, start, end


def _frames(numbered: Numbered) -> tuple[bytes, bytes]:
    return numbered.sequence.to_bytes(8, "big"), encode(numbered.batch)


def encode(batch: KvBatch) -> bytes:
    """Encode a batch in the form that subscribers of vLLM's publisher decode."""
    return msgspec.msgpack.encode((batch.time, [_event(event) for event in batch.events], RANK))


def _event(event: CacheEvent) -> tuple[Any, ...]:
    """Return an event's name followed by its fields in vLLM's order; fields that do not apply here are None."""
    if isinstance(event, Stored):
        hashes = [block_number(name) for name in event.names]
        parent = None if event.parent is None else block_number(event.parent)
        ids = np.frombuffer(event.token_ids, "<i4").tolist()
        # The adapter is an extra key of every block, the salt of a sequence's first one: later blocks depend on it
        # through their parent's hash.
        each = [event.adapter] if event.adapter else []
        first = [*each, event.salt] if event.salt and parent is None else each
        keys = [first or None, *[each or None] * (len(hashes) - 1)] if first or each else None
        lora_id, lora_name = None, event.adapter or None
        return "BlockStored", hashes, parent, ids, event.block_size, lora_id, event.medium, lora_name, keys
    if isinstance(event, Removed):
        return "BlockRemoved", [block_number(name) for name in event.names], event.medium
    return ("AllBlocksCleared",)
