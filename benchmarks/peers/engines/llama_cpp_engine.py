"""The llama.cpp engine for the comparison, by its C interface: one llama_decode per batch, ids by argmax."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llama_cpp as api
import numpy as np
from peers.recorder import Prompts, Recorder

UBATCH = 512


class LlamaCpp:
    def __init__(self, model: Any, threads: int, log: Any) -> None:
        self.model, self.threads, self.log = model, threads, log  # kept alive because llama.cpp keeps calling `log`
        self.context: Any = None
        self.room = (0, 0)  # number of sequences of the context, and tokens of each
        self.vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self.batch = api.llama_batch_init(2048, 0, 1)

    def make_room(self, sequences: int, tokens: int) -> None:
        """Make a context for these sizes, unless it exists; the first run of a case makes it and does not count.

        Each sequence has its own KV cache. With a shared one, attention covers the tokens of all sequences, most of
        them masked, and 32 concurrent sequences are half as fast.
        """
        room = (sequences, -(-tokens // 256) * 256)
        if self.room == room:
            return
        if self.context is not None:
            api.llama_free(self.context)
        params = api.llama_context_default_params()
        params.n_ctx = room[0] * room[1]
        params.n_batch, params.n_ubatch, params.n_seq_max = 2048, UBATCH, sequences
        params.n_threads = params.n_threads_batch = self.threads
        params.kv_unified = False
        self.context, self.room = api.llama_init_from_model(self.model, params), room
        if not self.context:
            raise SystemExit(f"llama.cpp has no context of {room[0]} sequences of {room[1]} tokens")

    def decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """Decode a batch of rows (id, position, sequence, whether logits are wanted)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = wanted
        if status := api.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode gave {status}")

    def best(self, row: int) -> int:
        logits = api.llama_get_logits_ith(self.context, row)
        return int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())

    def run(self, prompts: Prompts, output_len: int) -> list[list[float]]:
        self.make_room(len(prompts), len(prompts[0]) + output_len)
        api.llama_memory_clear(api.llama_get_memory(self.context), True)
        recorder, last = Recorder(len(prompts)), []
        for sequence, prompt in enumerate(prompts):
            for first in range(0, len(prompt), 2048):
                part = prompt[first : first + 2048]
                end = len(prompt) - 1 - first
                self.decode([(token, first + at, sequence, at == end) for at, token in enumerate(part)])
            last.append(self.best(-1))
            recorder.add(sequence)
        for step in range(output_len - 1):
            self.decode([(token, len(prompts[0]) + step, sequence, True) for sequence, token in enumerate(last)])
            last = [self.best(row) for row in range(len(prompts))]
            for sequence in range(len(prompts)):
                recorder.add(sequence)
        return recorder.arrivals


def load(path: Path, format: str, threads: int, max_requests: int, max_len: int) -> LlamaCpp:
    del format, max_requests, max_len
    quiet = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(quiet, ctypes.c_void_p())
    api.llama_backend_init()
    model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    return LlamaCpp(model, threads, quiet)
