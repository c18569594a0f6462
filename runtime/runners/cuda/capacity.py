"""The sizes that steps on a GPU are laid out for: capacities, rows of logits at a time, batch sizes with a graph."""

from __future__ import annotations

from dataclasses import dataclass

from inferc.arena import MostRows, align_rows

MAX_SAMPLE_ROWS = 256


@dataclass(frozen=True)
class Capacity:
    """The most tokens, sequences and logits rows of a step."""

    tokens: int
    seqs: int
    rows: int


def sample_rows(max_num_seqs: int) -> int:
    """Return how many rows of logits exist at a time."""
    return min(MAX_SAMPLE_ROWS, align_rows(max_num_seqs))


def most_rows(capacity: Capacity, max_num_seqs: int) -> MostRows:
    """Return the row counts that the arena is sized for."""
    return MostRows.of(capacity.tokens, capacity.rows, capacity.seqs, sample_rows(max_num_seqs))


def most_of_all(max_num_tokens: int, max_num_seqs: int) -> Capacity:
    """Return the capacity that the memory is sized for.

    Scoring asks for a logits row per token, and a graph has room for more sequences than `max_num_seqs`.
    """
    tokens, seqs = align_rows(max_num_tokens), align_rows(max_num_seqs)
    return Capacity(max(tokens, seqs), seqs, max(tokens, seqs))


def buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Return the batch sizes for which steps have a graph: dense where padding would cost most of a step."""
    sizes = [1, 2, 4, *range(8, 129, 8), *range(192, 1025, 64)]
    fitting = [size for size in sizes if size < max_num_seqs]
    return (*fitting, next((size for size in sizes if size >= max_num_seqs), sizes[-1]))


def capacity_for(count: int) -> int:
    """Return the smallest power of two that is at least `count` and at least 64.

    The layouts of steps without a graph are few thereby, and a buffer seldom has to grow.
    """
    return max(64, 1 << (count - 1).bit_length()) if count > 1 else 64
