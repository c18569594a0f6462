"""Calls on a stack of a chosen size: what they return and raise, the size itself, and that no other thread gets it."""

from __future__ import annotations

import ctypes
import sys
import threading

import pytest

from inferc.system.stack import on_stack

SIZE = 40 << 20


def stack_bytes() -> int:
    """Return the size of this thread's stack."""
    system = ctypes.CDLL(None)
    attributes, size = ctypes.create_string_buffer(256), ctypes.c_size_t()
    assert system.pthread_getattr_np(ctypes.c_ulong(threading.get_ident()), attributes) == 0
    assert system.pthread_attr_getstacksize(attributes, ctypes.byref(size)) == 0
    system.pthread_attr_destroy(attributes)
    return size.value


def test_a_call_has_the_stack_that_is_asked_for_and_no_other_thread_has() -> None:
    before = threading.stack_size()
    assert on_stack(SIZE, stack_bytes) == SIZE
    assert threading.stack_size() == before
    found = list[int]()
    thread = threading.Thread(target=lambda: found.append(stack_bytes()))
    thread.start()
    thread.join()
    assert found[0] != SIZE


def test_what_a_call_returns_and_raises_is_the_callers() -> None:
    here = threading.get_ident()
    assert on_stack(SIZE, threading.get_ident) != here
    with pytest.raises(ZeroDivisionError):
        on_stack(SIZE, lambda: 1 // 0)
    with pytest.raises(SystemExit):
        on_stack(SIZE, lambda: sys.exit(3))
