"""The compiler of an engine's grammars: in processes beside it, by content, with the last used kept."""

from __future__ import annotations

import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from inferc.config import Auto, GrammarBackend
from inferc.errors import RequestError, UnsupportedError
from inferc.runtime.grammar.backend import Backend, CompiledGrammar, choose_backend, open_backend
from inferc.runtime.grammar.compile_worker import COMPILED, NICENESS, REFUSED, STACK_BYTES
from inferc.runtime.grammar.spelling import Spelling
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.step.structured_outputs import StructuredOutputs
from inferc.system.stack import on_stack
from inferc.system.worker_process import WorkerEnded, WorkerLimits, WorkerProcess

MODULE = "inferc.runtime.grammar.compile_worker"
LIMITS = WorkerLimits(max_seconds=5.0, max_bytes=2 << 30)
AT_ONCE = 2  # grammars that are compiled at a time: a slow one holds up no other
KEPT_BYTES = 256 << 20  # of compiled grammars that no request may be using any more


class GrammarCompiler:
    """A compiler that returns a grammar at once if it was compiled before, and otherwise later.

    make_vocabulary: called once, on the first grammar, on another thread. It is thread-safe.
    """

    def __init__(
        self,
        make_vocabulary: Callable[[], Vocabulary],
        choice: GrammarBackend | Auto = "auto",
        limits: WorkerLimits = LIMITS,
    ) -> None:
        self._make_vocabulary, self._choice, self._limits = make_vocabulary, choice, limits
        self._lock = threading.Lock()  # held for moments: the engine's thread takes it
        self._opening = threading.Lock()
        self._backend: Backend | None = None
        self.spelling: Spelling | None = None  # of the vocabulary, once a grammar was compiled
        self._first = b""  # the backend and the vocabulary, as the processes get it
        self._pool = ThreadPoolExecutor(AT_ONCE, "inferc-grammar")
        self._idle: list[WorkerProcess] = []
        self._processes: list[WorkerProcess] = []
        # The grammars by their content, in the order of their last use.
        self._grammars: OrderedDict[StructuredOutputs, Future[CompiledGrammar]] = OrderedDict()

    def compile(self, wanted: StructuredOutputs) -> Future[CompiledGrammar]:
        """Return the grammar of a form, which may be done already.

        It fails with RequestError for a form that cannot be held to, with UnsupportedError if no library is there.
        """
        with self._lock:
            if (found := self._grammars.get(wanted)) is not None:
                self._grammars.move_to_end(wanted)
                return found
            made = self._grammars[wanted] = self._pool.submit(self._compile, wanted)
        made.add_done_callback(lambda done: self._keep(wanted, done))  # which may be called here and now
        return made

    def close(self) -> None:
        """End the processes; grammars that are being compiled fail."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._end_processes()
        self._pool.shutdown(wait=True)
        self._end_processes()  # those that were about to be asked

    def _end_processes(self) -> None:
        for process in self._processes:
            process.close()

    def _compile(self, wanted: StructuredOutputs) -> CompiledGrammar:
        backend, process = self._open()
        try:
            answer = process.ask(msgspec.msgpack.encode(wanted))
        except WorkerEnded as error:
            raise RequestError(f"compiling it {error}; make it smaller") from None
        finally:
            with self._lock:
                self._idle.append(process)
        kind, rest = answer[:1], answer[1:]
        if kind == COMPILED:
            return on_stack(2 * STACK_BYTES, lambda: _load(backend, rest))
        raise (RequestError if kind == REFUSED else UnsupportedError)(rest.decode())

    def _open(self) -> tuple[Backend, WorkerProcess]:
        with self._opening:
            if self._backend is None:
                vocabulary = self._make_vocabulary()
                name = choose_backend(self._choice)
                self._first = msgspec.msgpack.encode((name, vocabulary))
                self._backend = open_backend(vocabulary, name)
                self.spelling = Spelling(vocabulary.tokens)
        with self._lock:
            if not self._idle:
                process = WorkerProcess(MODULE, "compiles grammars", self._first, self._limits)
                self._processes.append(process)
                self._idle.append(process)
            return self._backend, self._idle.pop()

    def _keep(self, wanted: StructuredOutputs, done: Future[CompiledGrammar]) -> None:
        """Forget a grammar that failed, and the least used ones beyond KEPT_BYTES."""
        with self._lock:
            if done.cancelled() or done.exception() is not None:
                self._grammars.pop(wanted, None)
                return
            sizes = {key: each.result().num_bytes for key, each in self._grammars.items() if _is_ready(each)}
            excess = sum(sizes.values()) - KEPT_BYTES
            for key, size in sizes.items():
                if excess <= 0 or key == wanted:
                    break
                del self._grammars[key]
                excess -= size


def _load(backend: Backend, data: bytes) -> CompiledGrammar:
    """Return what was compiled, on this thread, which has no other work; steps go first here too."""
    if sys.platform == "linux":  # elsewhere a thread has no niceness of its own
        nice = os.getpriority(os.PRIO_PROCESS, 0) + NICENESS
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(nice, 19))
    return backend.load(data)


def _is_ready(grammar: Future[CompiledGrammar]) -> bool:
    return grammar.done() and not grammar.cancelled() and grammar.exception() is None
