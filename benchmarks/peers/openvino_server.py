"""A server for OpenVINO GenAI with OpenAI's completions interface, as far as `inferc bench serve` needs it.

    python benchmarks/peers/openvino_server.py MODEL [--port 0] [--threads N] [--max-num-seqs 64]
                                               [--max-num-batched-tokens 512]

It runs in OpenVINO's environment and otherwise needs only the standard library. GenAI has no server of its own; this
one adds little work: a thread steps the continuous-batching pipeline, and an event loop reads requests and writes one
chunk per step. Chunks have no text (detokenizing would only cost time) but the usage so far; prompts are token ids. It
prints `ready PORT`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
import openvino_genai

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"


@dataclass
class Request:
    """A completion request.

    tell: called on the pipeline's thread with the new token ids of each step, and with None at the end.
    """

    prompt: list[int]
    max_tokens: int
    tell: Callable[[list[int] | None], None]
    is_left: bool = False
    handle: Any = field(default=None, repr=False)


class Pipeline:
    """The OpenVINO pipeline with its thread, which steps as long as there are requests."""

    def __init__(
        self, model: str, threads: int, max_num_seqs: int, max_num_batched_tokens: int, split_fuse: bool
    ) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = 4
        scheduler.max_num_seqs = max_num_seqs
        scheduler.max_num_batched_tokens = max_num_batched_tokens
        scheduler.dynamic_split_fuse = split_fuse
        scheduler.enable_prefix_caching = False
        properties = {"INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)
        self.inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._numbers = itertools.count()

    def run(self) -> None:
        running: list[Request] = []
        while True:
            while not running or not self.inbox.empty():
                running.append(self._add(self.inbox.get()))
            self._pipeline.step()
            for request in list(running):
                while request.handle.can_read():
                    for output in request.handle.read().values():
                        request.tell(list(output.generated_ids))
                is_over = request.handle.get_status() != openvino_genai.GenerationStatus.RUNNING
                if request.is_left and not is_over:
                    request.handle.drop()
                if is_over or request.is_left:
                    request.tell(None)
                    running.remove(request)

    def _add(self, request: Request) -> Request:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = request.max_tokens
        config.ignore_eos, config.do_sample = True, False
        ids = openvino.Tensor(np.array([request.prompt], np.int64))
        request.handle = self._pipeline.add_request(next(self._numbers), ids, config)
        return request


async def answer(pipeline: Pipeline, facts: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        sizes = [line.partition(":")[2] for line in lines if line.lower().startswith("content-length:")]
        if not head.startswith(b"POST "):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n" + facts)
            return
        body = json.loads(await reader.readexactly(int(sizes[0])))
        prompt = body["prompt"]
        if not isinstance(prompt, list) or not body.get("stream"):
            writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n{}")
            return
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[list[int] | None]()

        def tell(ids: list[int] | None) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, ids)

        request = Request(prompt, int(body["max_tokens"]), tell)
        pipeline.inbox.put(request)
        writer.write(HEAD)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": 0}

        def chunk(**choice: object) -> bytes:
            return (
                b"data: "
                + json.dumps({"choices": [{"index": 0, "text": "", **choice}], "usage": usage}).encode()
                + b"\n\n"
            )

        try:
            while (ids := await pieces.get()) is not None:
                usage["completion_tokens"] += len(ids)
                writer.write(chunk(finish_reason=None))
                await writer.drain()
        finally:
            request.is_left = True
        writer.write(chunk(finish_reason="length"))
        writer.write(b"data: [DONE]\n\n")
        await writer.drain()
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def serve(pipeline: Pipeline, name: str, port: int) -> None:
    facts = json.dumps({"object": "list", "data": [{"id": name, "object": "model"}]}).encode()
    server = await asyncio.start_server(
        lambda *streams: answer(pipeline, facts, *streams), "127.0.0.1", port, limit=1 << 22
    )
    print(f"ready {server.sockets[0].getsockname()[1]}", flush=True)
    threading.Thread(target=pipeline.run, daemon=True).start()
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--max-num-batched-tokens", type=int, default=512)
    parser.add_argument("--split-fuse", action=argparse.BooleanOptionalAction, default=False, help="chunked prefill")
    given = parser.parse_args()
    pipeline = Pipeline(given.model, given.threads, given.max_num_seqs, given.max_num_batched_tokens, given.split_fuse)
    asyncio.run(serve(pipeline, given.model, given.port))


if __name__ == "__main__":
    main()
