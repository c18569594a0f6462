"""The prompts that certificates compare logits on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

PROMPT_LENGTHS = (7, 24, 40, 64)
GREEDY_TOKENS = 16
PROMPT_TEXT = (
    "def read_lines(path):\n    with open(path) as file:\n        return [line.rstrip() for line in file]\n",
    "The compiler reads the model once, writes what the machine needs to run it, and never has to look at it again. ",
    "Question: what is the capital of France, and which river runs through it? Answer: ",
    (
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n"
        "    def push(self, item):\n        self.items.append(item)\n"
    ),
)
# The text that the kernels are judged on has prose, code, numbers, names and a conversation: few tokens are sure.
LONG_TEXT = (
    "The station at the top of the pass has kept its log since 1931. Every morning at six somebody writes down how cold"
    " it is, how much snow has fallen, and which of the two roads is open; on bad days the entry is a single word."
    " Engineers who plan the new tunnel have read all ninety volumes. They found that the wind turns in the second"
    " week of March, a little earlier each decade, and that the road on the north side closes twice as often.\n\n"
    "def moving_average(values, window):\n"
    "    total, averages = sum(values[:window]), []\n"
    "    for index in range(window, len(values)):\n"
    "        averages.append(total / window)\n"
    "        total += values[index] - values[index - window]\n"
    "    return averages\n\n"
    "| month | snow (cm) | north road | south road |\n|---|---|---|---|\n| January | 212 | 9 days | 21 days |\n"
    "| February | 187 | 11 days | 23 days |\n| March | 96 | 24 days | 30 days |\n\n"
    "User: Which road should I take on the 14th of February, and how long does it take to drive 38 km at 45 km/h?\n"
    "Assistant: Take the south road, which was open on 23 days of that month. At 45 km/h, 38 km take about 51 minutes;"
    " allow an hour if it snows.\n"
)
LONG_TOKENS = 256


def make_prompts(encode: Callable[[str], list[int]] | None, vocab_size: int, max_model_len: int) -> list[list[int]]:
    """Return the token ids of a few prompts of different lengths: text where there is a tokenizer, else random ids."""
    generator = np.random.default_rng(0)
    prompts = []
    for length, text in zip(PROMPT_LENGTHS, PROMPT_TEXT, strict=True):
        length = max(1, min(length, max_model_len - GREEDY_TOKENS))
        ids = encode(text * 8) if encode is not None else generator.integers(0, vocab_size, length).tolist()
        prompts.append(ids[:length])
    return prompts


def make_long_prompt(encode: Callable[[str], list[int]] | None, vocab_size: int, max_model_len: int) -> list[int]:
    """Return the token ids of one text of some hundred tokens, or random ids without a tokenizer."""
    length = max(1, min(LONG_TOKENS, max_model_len - GREEDY_TOKENS))
    if encode is None:
        return [int(each) for each in np.random.default_rng(1).integers(0, vocab_size, length)]
    ids = encode(LONG_TEXT)
    return (ids * -(-length // max(1, len(ids))))[:length]


def encoder(tokenizer_json: bytes | None) -> Callable[[str], list[int]] | None:
    """Return a function from text to ids by an artifact's tokenizer.json; None without one."""
    if tokenizer_json is None:
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    return lambda text: list(tokenizer.encode(text).ids)
