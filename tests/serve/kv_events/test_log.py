"""KV events as subscribers get them: over ZeroMQ, decoded as a router for vLLM does, and over gRPC."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import grpc
import msgspec
import psutil
import pytest
import zmq
from command_line import run_inferc
from serving import ENV, Server, wait_until
from zmq.utils.monitor import recv_monitor_message

from inferc.client import SERVICE, AsyncClient, Client, ServerError
from inferc.errors import ConfigError, RequestError
from inferc.runtime.kv_cache.events import CacheEvent, Cleared, KvBatch, Removed, Stored
from inferc.serve.errors import BatchesGone, EngineUnavailable
from inferc.serve.kv_events.log import KvEventLog, KvPublisherConfig, Numbered
from inferc.serve.kv_events.publisher import KvPublisher
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

TOPIC = "kv@replica-0@tiny"
END = b"\xff" * 8
BLOCK_SIZE = 32


# What a subscriber of vLLM declares, written from its documentation and not from what sends it.
class Event(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[tuple[str, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


DECODER = msgspec.msgpack.Decoder(EventBatch)


@final
@dataclass
class Subscriber:
    """Follows one publisher, and knows what it holds: a block's parent and tokens, by its hash."""

    config: KvPublisherConfig
    topic: str = TOPIC
    batches: dict[int, EventBatch] = field(default_factory=dict)
    held: dict[int, tuple[int | None, tuple[int, ...]]] = field(default_factory=dict)

    def __enter__(self) -> Subscriber:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sub = self.context.socket(zmq.SUB)
        self.handshakes = self.sub.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.sub.connect(self.config.endpoint)
        self.sub.setsockopt_string(zmq.SUBSCRIBE, self.topic)
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.connect(self.config.replay or "")
        return self

    def __exit__(self, *_: object) -> None:
        self.context.destroy(linger=0)

    def connected(self) -> None:
        """Wait for the connection, over which the subscriptions so far then are on their way."""
        assert self.handshakes.poll(20_000), "no connection"
        recv_monitor_message(self.handshakes)

    def receive(self, timeout: float = 20.0) -> int:
        """Wait for a message; the number of its batch."""
        assert self.sub.poll(int(timeout * 1000)), "nothing came"
        topic, number, payload = self.sub.recv_multipart()
        assert topic.decode() == self.config.topic and len(number) == 8
        sequence = int.from_bytes(number, "big")
        self.batches[sequence] = DECODER.decode(payload)
        return sequence

    def replay(self, start: int) -> list[int]:
        """Ask for what was missed; the numbers of the batches that came."""
        self.dealer.send_multipart((b"", start.to_bytes(8, "big")))
        found: list[int] = []
        while True:
            assert self.dealer.poll(20_000), "no answer"
            empty, topic, number, payload = self.dealer.recv_multipart()
            assert empty == b""
            if number == END:
                assert topic == payload == b""
                return found
            assert topic.decode() == self.config.topic
            found.append(int.from_bytes(number, "big"))
            self.batches[found[-1]] = DECODER.decode(payload)

    def rebuild(self) -> None:
        """Return the blocks that all batches together announce."""
        assert sorted(self.batches) == list(range(len(self.batches))), "some are missing"
        self.held.clear()
        for _, batch in sorted(self.batches.items()):
            for event in batch.events:
                self._take(event)

    def _take(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self.held.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del self.held[int_of(name)]
        else:
            parent = None if event.parent_block_hash is None else int_of(event.parent_block_hash)
            size = event.block_size
            for index, name in enumerate(map(int_of, event.block_hashes)):
                self.held[name] = parent, tuple(event.token_ids[index * size : (index + 1) * size])
                parent = name

    def num_cached(self, prompt: list[int]) -> int:
        """Return how many tokens of a prompt the server should have, one at least being left to compute."""
        by_place = {place: name for name, place in self.held.items()}
        parent: int | None = None
        for start in range(0, len(prompt) - 1, BLOCK_SIZE):
            block = tuple(prompt[start : start + BLOCK_SIZE])
            if (parent, block) not in by_place or start + BLOCK_SIZE >= len(prompt):
                return start
            parent = by_place[parent, block]
        return len(prompt) - 1


def int_of(name: bytes | int) -> int:
    assert isinstance(name, int) and 0 <= name < 2**64
    return name


def stored(index: int, medium: str = "GPU", salt: str = "") -> Stored:
    ids = b"".join(token.to_bytes(4, "little") for token in (index, index, 2**31 - 1, 0))
    return Stored([index.to_bytes(32, "big"), (index + 1000).to_bytes(32, "big")], None, ids, 2, salt, medium)


def add(events: KvEventLog, *batch: CacheEvent) -> None:
    events.add(KvBatch(1.5, list(batch)))


@pytest.fixture
def events() -> KvEventLog:
    return KvEventLog(num_kept=100)


@pytest.fixture
def config(tmp_path: Path) -> KvPublisherConfig:
    return KvPublisherConfig(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay", TOPIC)


@pytest.fixture
def subscriber(config: KvPublisherConfig, events: KvEventLog) -> Iterator[Subscriber]:
    """Return a connected subscriber of a publisher in this process."""
    publisher = KvPublisher(config, events)
    publisher.start()
    with Subscriber(config) as made:
        join(made, lambda: add(events, Cleared()))
        yield made
        publisher.close()


def join(subscriber: Subscriber, publish: Callable[[], None]) -> None:
    """Publish until a subscription has arrived: what is published before goes past it, and no event tells of it."""

    def has_arrived() -> bool:
        publish()
        return subscriber.sub.poll(0) > 0

    wait_until(has_arrived, "the subscription stands")


# --------------------------------------------------------------------------------------------------- ZeroMQ


def test_events_have_the_form_that_routers_decode(subscriber: Subscriber, events: KvEventLog) -> None:
    name = (2**256 - 5).to_bytes(32, "big")
    chain = Stored([name], (7).to_bytes(32, "big"), b"\x01\0\0\0\x02\0\0\0", 2, "salt", "CPU_PINNED")
    add(events, stored(1), stored(2, salt="tenant"), chain, Removed([name], "DISK"), Cleared())
    last = events.end - 1
    while subscriber.receive() != last:
        pass
    batch = subscriber.batches[last]
    assert (batch.ts, batch.data_parallel_rank) == (1.5, 0)
    first, salted, behind, removed, cleared = batch.events
    assert first == BlockStored([1, 1001], None, [1, 1, 2**31 - 1, 0], 2, None, "GPU", None, None)
    assert isinstance(salted, BlockStored) and salted.extra_keys == [("tenant",), None]
    assert behind == BlockStored([2**64 - 5], 7, [1, 2], 2, None, "CPU_PINNED", None, None)
    assert removed == BlockRemoved([2**64 - 5], "DISK") and cleared == AllBlocksCleared()


def test_what_was_missed_is_replayed(subscriber: Subscriber, events: KvEventLog) -> None:
    before = events.end
    for index in range(200):
        add(events, stored(index))
    while subscriber.receive() != before + 199:
        pass
    subscriber.batches.clear()
    kept = list(range(events.end - 100, events.end))
    assert subscriber.replay(0) == kept, "as many as are kept"
    assert subscriber.replay(kept[-3]) == kept[-3:]
    assert subscriber.replay(events.end) == subscriber.replay(2**64 - 1) == []
    assert subscriber.batches[kept[-1]].events == [
        BlockStored([199, 1199], None, [199, 199, 2**31 - 1, 0], 2, None, "GPU")
    ]


def test_a_request_that_is_none_is_passed_over(
    subscriber: Subscriber, events: KvEventLog, caplog: pytest.LogCaptureFixture
) -> None:
    for frames in ((b"",), (b"", b"1"), (b"x", bytes(8)), (b"", b"", bytes(8))):
        subscriber.dealer.send_multipart(frames)
    assert subscriber.replay(events.end) == []
    assert caplog.text.count("a request for KV events is none") == 4


def test_only_its_topic_reaches_a_subscriber(config: KvPublisherConfig, events: KvEventLog) -> None:
    publisher = KvPublisher(config, events)
    publisher.start()
    with Subscriber(config, topic="kv@replica-1") as other, Subscriber(config, topic="kv@") as all_replicas:
        other.connected()
        join(all_replicas, lambda: add(events, Cleared()))
        before = events.end
        while all_replicas.receive() != before - 1:
            pass
        other.sub.setsockopt_string(zmq.SUBSCRIBE, TOPIC)  # behind all that is not to reach it
        join(other, lambda: add(events, Cleared()))
        assert other.receive() >= before
        publisher.close()


def test_what_is_left_goes_out_before_it_closes(config: KvPublisherConfig, events: KvEventLog) -> None:
    publisher = KvPublisher(config, events)
    publisher.start()
    with Subscriber(config) as subscriber:
        join(subscriber, lambda: add(events, Cleared()))
        for index in range(90):
            add(events, stored(index))
        events.close("the engine died")
        publisher.close()
        while (sequence := subscriber.receive()) != events.end - 1:
            pass
        assert subscriber.batches[sequence].events == [AllBlocksCleared()]


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1", "127.0.0.1:5557", "udp://1.2.3.4:5", "tcp://a b:1", "ipc://"])
def test_an_endpoint_that_is_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="expected tcp://ADDRESS:PORT"):
        KvPublisherConfig(endpoint)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--kv-events", "tcp://nowhere"), "--kv-events tcp://nowhere: expected tcp://ADDRESS:PORT"),
        (
            ("--kv-events", "tcp://203.0.113.7:5557", "--insecure"),
            "cannot listen for KV event subscribers on tcp://203.0.113.7:5557",
        ),
        (("--kv-events", "tcp://localhost:65536"), "--kv-events tcp://localhost:65536: expected tcp://ADDRESS:PORT"),
        (("--kv-events", "grpc", "--kv-events-replay", "tcp://127.0.0.1:5558"), "need an endpoint"),
        (("--kv-events-topic", "kv"), "need an endpoint"),
    ],
)
def test_serve_refuses_what_cannot_be_published(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = run_inferc("serve", tmp_path / "none", "--grpc-port", "0", "--http-port", "0", *options)
    assert done.returncode == 2 and message in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


@pytest.mark.slow
def test_serve_refuses_a_port_that_another_publisher_has(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        socket.bind("tcp://127.0.0.1:0")
        taken = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        free = f"ipc://{tmp_path}/pub"
        for options in (("--kv-events", taken), ("--kv-events", free, "--kv-events-replay", taken)):
            done = run_inferc("serve", tmp_path / "none", "--grpc-port", "0", "--http-port", "0", *options)
            assert done.returncode == 2, done.stderr
            assert f"on {taken}: Address already in use" in done.stderr.splitlines()[-1]


def test_without_events_their_library_is_not_imported() -> None:
    code = "import sys, inferc.serve.server; sys.exit(len({'zmq'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], env=ENV, check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------ the log


def test_the_oldest_go_by_number_and_by_size() -> None:
    events = KvEventLog(num_kept=3)
    for index in range(5):
        add(events, stored(index))
    assert (events.first, events.end) == (2, 5)
    assert [numbered.sequence for numbered in events.read(3)] == [3, 4] and events.read(5) == []
    assert [numbered.sequence for numbered in events.read(2, 2)] == [2, 3]
    for start in (1, 6):
        with pytest.raises(BatchesGone, match=f"from {start} on are not here: kept are 2 to 4, and 5 comes next"):
            events.read(start)
    small = KvEventLog(max_bytes=200)
    for index in range(5):
        add(small, stored(index))  # of 80 bytes
    assert (small.first, small.end) == (3, 5)


def test_who_falls_behind_is_told_and_stalls_nobody() -> None:
    async def follow() -> None:
        events = KvEventLog(num_kept=70)
        slow, quick = events.follow(0), events.follow(0)
        add(events, Cleared())
        assert (await anext(slow)).sequence == (await anext(quick)).sequence == 0
        for index in range(200):
            add(events, stored(index))
            assert (await anext(quick)).sequence == index + 1
        with pytest.raises(BatchesGone, match="from 1 on are not here"):
            await anext(slow)
        await quick.aclose()

    asyncio.run(follow())


def test_a_closed_log_is_read_to_its_end() -> None:
    async def follow() -> list[Numbered]:
        events, found = KvEventLog(), []
        add(events, stored(1))
        asyncio.get_running_loop().call_soon(events.close, "the engine died")
        with pytest.raises(EngineUnavailable, match="the engine died"):
            async for numbered in events.follow(0):
                found.append(numbered)
        events.close("again")
        add(events, stored(2))
        assert events.end == 2
        return found

    first, last = asyncio.run(follow())
    assert first.batch.events == [stored(1)] and last.batch.events == [Cleared()]


# --------------------------------------------------------------------------------------------------- a server


@pytest.fixture(scope="module")
def publishing(tiny_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Subscriber]]:
    """A server whose cache has 8 blocks, and who follows it."""
    folder = tmp_path_factory.mktemp("sockets")
    config = KvPublisherConfig(f"ipc://{folder}/pub", f"ipc://{folder}/replay", TOPIC)
    options = ("--kv-events", config.endpoint, "--kv-events-replay", str(config.replay), "--kv-events-topic", TOPIC)
    with Server(tiny_artifact, "--max-num-seqs", "1", *options) as server, Subscriber(config) as subscriber:
        yield server, subscriber


def generate(address: str, prompt: list[int]) -> int:
    """Tokens of the prompt that were found."""
    sampling = pb.SamplingParams(max_tokens=2, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
    with grpc.insecure_channel(address) as channel:
        stream = channel.unary_stream(f"/{SERVICE}/Generate", bytes, pb.GenerateResponse.FromString)
        return int(list(stream(request.SerializeToString(), timeout=60))[-1].usage.cached_tokens)


def by_hash(batches: list[pb.KvEventBatch]) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    """Return the blocks in the messages of SubscribeKvEvents by hash, like `Subscriber.held`."""
    held: dict[int, tuple[int | None, tuple[int, ...]]] = {}
    for event in (event for batch in batches for event in batch.events):
        if event.HasField("cleared"):
            held.clear()
        for name in event.removed.block_hashes:
            del held[name]
        parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
        for index, name in enumerate(event.stored.block_hashes):
            size = event.stored.block_size
            held[name] = parent, tuple(event.stored.token_ids[index * size : (index + 1) * size])
            parent = name
    return held


def test_a_router_knows_what_a_server_will_find(publishing: tuple[Server, Subscriber]) -> None:
    server, subscriber = publishing
    prompts = [[first] * 5 + list(range(20, 20 + 75)) for first in range(3, 9)]
    with Client(server.address, timeout=60) as client:
        live = client.kv_events()
        for prompt in prompts:
            generate(server.address, prompt)
        next_sequence = next(live).sequence
        for prompt in (*prompts, *prompts[::-1]):
            subscriber.replay(0)
            subscriber.rebuild()
            assert len(subscriber.held) <= 8
            expected = subscriber.num_cached(prompt)
            # Events tell of full blocks; the first tokens of one more may be found too.
            assert generate(server.address, prompt) // 32 * 32 == expected
        subscriber.replay(0)
        subscriber.rebuild()
        from_start = client.kv_events(0)
        batches = [next(from_start) for _ in subscriber.batches]
        assert by_hash(batches) == subscriber.held != {}
        assert [batch.sequence for batch in batches] == list(range(len(batches)))
        assert len({batch.epoch for batch in batches}) == 1 and batches[0].events[0].HasField("cleared")
        assert any(event.HasField("removed") for batch in batches for event in batch.events)
        times = [subscriber.batches[batch.sequence].ts for batch in batches]
        assert [batch.time for batch in batches] == times == sorted(times)
        assert next(live).sequence == next_sequence + 1


def test_live_events_come_over_both(publishing: tuple[Server, Subscriber]) -> None:
    server, subscriber = publishing
    prompts = iter([[40 + index] * 40 for index in range(200)])
    join(subscriber, lambda: void(generate(server.address, next(prompts))))
    with Client(server.address, timeout=60) as client:
        live = client.kv_events()
        generate(server.address, next(prompts))
        batch = next(live)
    while subscriber.receive() != batch.sequence:
        pass
    found = [type(event).__name__ for event in subscriber.batches[batch.sequence].events]
    assert found == [
        {"stored": "BlockStored", "removed": "BlockRemoved"}[str(e.WhichOneof("event"))] for e in batch.events
    ]


def test_the_async_client_subscribes_too(publishing: tuple[Server, Subscriber]) -> None:
    async def work(address: str) -> None:
        async with AsyncClient(address, timeout=60) as client:
            live = await client.kv_events()
            await client.complete([39] * 70, max_tokens=1, temperature=0)  # which no other test asks for
            batch = await anext(live)
            assert [token for event in batch.events for token in event.stored.token_ids] == [39] * 64
            await live.aclose()  # type: ignore[attr-defined]
            first = await anext(await client.kv_events(0))
            assert first.sequence == 0 and first.events[0].HasField("cleared")
            with pytest.raises(ServerError, match="OUT_OF_RANGE: KV events from 100000 on are not here"):
                await anext(await client.kv_events(100_000))
            with pytest.raises(RequestError, match="start_sequence"):
                await client.kv_events(-1)

    asyncio.run(asyncio.wait_for(work(publishing[0].address), 60))


def void(_: object) -> None:
    """For a call whose result is nobody's."""


def test_a_subscription_to_what_never_was(publishing: tuple[Server, Subscriber]) -> None:
    with Client(publishing[0].address, timeout=60) as client:
        with pytest.raises(ServerError, match="OUT_OF_RANGE: KV events from 100000 on are not here: kept are 0 to"):
            next(client.kv_events(100_000))
        with pytest.raises(RequestError, match="start_sequence"):
            client.kv_events(-1)


def test_a_server_without_events_says_how_to_have_them(served: str) -> None:
    with Client(served, timeout=60) as client, pytest.raises(ServerError) as raised:
        next(client.kv_events())
    assert raised.value.code == "FAILED_PRECONDITION" and "--kv-events grpc" in str(raised.value)


@pytest.mark.slow
def test_subscriptions_end_with_the_server(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, "--kv-events", "grpc") as server, Client(server.address, timeout=60) as client:
        live = client.kv_events(0)
        assert next(live).events[0].HasField("cleared")
        generate(server.address, [5] * 40)
        assert next(live).events[0].stored.token_ids == [5] * 32
        server.terminate()
        assert next(live).events[0].HasField("cleared")
        with pytest.raises(ServerError, match="shutting down") as raised:
            next(live)
        assert raised.value.code == "UNAVAILABLE"
        assert server.process.wait(20) == 0


@pytest.mark.slow
def test_subscriptions_go_on_with_the_next_engine(tiny_artifact: Path) -> None:
    """The blocks of the engine that died can no longer be found, and those of the next one can."""
    with Server(tiny_artifact, "--kv-events", "grpc") as server, Client(server.address, timeout=60) as client:
        live = client.kv_events(0)
        generate(server.address, [5] * 40)
        kinds = [next(live).events[0].WhichOneof("event") for _ in range(2)]
        psutil.Process(server.process.pid).children()[0].kill()
        kinds += [next(live).events[0].WhichOneof("event") for _ in range(2)]
        generate(server.address, [5] * 40)
        again = next(live)
        assert kinds == ["cleared", "stored", "cleared", "cleared"]
        assert (again.sequence, list(again.events[0].stored.token_ids)) == (4, [5] * 32)
        client.sleep_model("")
        assert next(live).events[0].HasField("cleared")


@pytest.mark.slow
def test_a_subscriber_hears_of_a_model_that_is_loaded_again(tiny_artifact: Path, tmp_path: Path) -> None:
    config = KvPublisherConfig(f"ipc://{tmp_path}/pub", f"ipc://{tmp_path}/replay", TOPIC)
    options = ("--kv-events", config.endpoint, "--kv-events-replay", config.replay or "", "--kv-events-topic", TOPIC)
    with (
        Server(tiny_artifact, *options) as server,
        Subscriber(config) as subscriber,
        Client(server.address, timeout=60) as client,
    ):
        generate(server.address, [5] * 40)
        client.unload_model(tiny_artifact.name)
        client.load_model(tiny_artifact.name)
        generate(server.address, [6] * 40)
        wait_until(lambda: 0 < len(subscriber.replay(0)) and len(stored_in(subscriber)) == 2, "all are published")
        subscriber.rebuild()
        assert [tokens for _, tokens in subscriber.held.values()] == [(6,) * 32], "what the first engine had is cleared"


def stored_in(subscriber: Subscriber) -> list[BlockStored]:
    batches = subscriber.batches.values()
    return [event for batch in batches for event in batch.events if isinstance(event, BlockStored)]
