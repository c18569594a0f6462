"""The search for stop strings in a streamed text, in a time per character independent of how much is held back.

Source: Aho and Corasick 1975, Efficient string matching, DOI 10.1145/360825.360855.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from functools import lru_cache

NO_CHAR = -1


class Automaton:
    """A state machine of all stop strings: each node is a prefix of some of them.

    The current node is the longest prefix that the text read so far ends in. A character costs an amortized constant
    number of moves. Memory is some 20 bytes for each character of the strings: nodes are numbered in order of creation,
    so the first child of a node has the next number, and only nodes with several children need a dictionary.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depths = array("i", [0])
        self._first = array("i", [NO_CHAR])  # per node, the character that leads to the node with the next number
        self._others: dict[int, dict[int, int]] = {}  # per node with several children, the other characters
        self._ends: dict[int, str] = {}  # the stop string of each node that completes one
        for stop in stops:
            self._add(stop)
        self._fall = array("i", [0]) * len(self.depths)  # per node, its longest suffix that is a prefix too
        self._found = array("i", [0]) * len(self.depths)  # per node, its longest suffix that is a stop string; 0: none
        self._connect()

    def _add(self, stop: str) -> None:
        node = 0
        for char in map(ord, stop):
            child = self._child(node, char)
            if not child:
                child = len(self.depths)
                self.depths.append(self.depths[node] + 1)
                self._first.append(NO_CHAR)
                if child == node + 1:
                    self._first[node] = char
                else:
                    self._others.setdefault(node, {})[char] = child
            node = child
        self._ends[node] = stop

    def _child(self, node: int, char: int) -> int:
        """Return the child of a node for a character, or 0 if there is none."""
        if self._first[node] == char:
            return node + 1
        others = self._others.get(node)
        return others.get(char, 0) if others is not None else 0

    def _connect(self) -> None:
        waiting = deque([0])
        while waiting:  # breadth first, so the node that a node falls back to is done before it
            node = waiting.popleft()
            children = [(self._first[node], node + 1)] if self._first[node] != NO_CHAR else []
            for char, child in [*children, *self._others.get(node, {}).items()]:
                self._fall[child] = self.step(self._fall[node], char) if node else 0
                self._found[child] = child if child in self._ends else self._found[self._fall[child]]
                waiting.append(child)

    def step(self, node: int, char: int) -> int:
        """Return the node after one more character."""
        while not (child := self._child(node, char)):
            if not node:
                return 0
            node = self._fall[node]
        return child

    def found(self, node: int) -> str | None:
        """Return the longest stop string that the text ends in, or None."""
        return self._ends[at] if (at := self._found[node]) else None


# The outputs of a request share an automaton, as do requests with the same stop strings. Each automaton has at most
# MAX_ALL_STOP_CHARACTERS nodes besides its root.
_automaton = lru_cache(maxsize=32)(Automaton)


class StopStrings:
    """A search for the first stop string in a streamed text, which holds back only what may be part of one.

    First means completed first, so the result does not depend on how the text is cut. Of several completed by the same
    character, the longest is found.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._automaton = _automaton(tuple(stops))
        self._include = include
        self._held = ""
        self._node = 0
        self._first = frozenset(stop[0] for stop in stops)

    def push(self, piece: str) -> tuple[str, str | None]:
        """Return the text that may be shown, and the stop string if one was found."""
        if not self._node and self._first.isdisjoint(piece):
            return piece, None
        automaton, node = self._automaton, self._node
        text = self._held + piece
        for end, char in enumerate(map(ord, piece), start=len(self._held) + 1):
            node = automaton.step(node, char)
            if (stop := automaton.found(node)) is not None:
                self._held, self._node = "", 0
                return text[: end if self._include else end - len(stop)], stop
        self._node, shown = node, len(text) - automaton.depths[node]
        self._held = text[shown:]
        return text[:shown], None

    def finish(self) -> str:
        """Return the text that was held back and did not become a stop string."""
        held, self._held, self._node = self._held, "", 0
        return held
