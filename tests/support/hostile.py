"""Requests that no client would send: JSON at the ends of what JSON is, and what surrounds it over HTTP."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Pairs = list[tuple[str, str]]  # of an object: names and values as JSON, so that a name can come twice

NUMBERS = (
    "0",
    "1",
    "2",
    "-1",
    "5",
    "16",
    "16.0",
    "1.5",
    "-0",
    "-0.0",
    "1e3",
    "1e-400",
    "1e400",
    "-1e400",
    "NaN",
    "Infinity",
    "-Infinity",
    str(2**31 - 1),
    str(2**31),
    str(-(2**31)),
    str(2**63),
    str(2**64 - 1),
    str(2**64),
    str(2**70),
    "1" * 400,
    "-" + "1" * 400,
    "1" * 4300,
    "1" * 4301,
    "1" * 6000,
    "1" * 400 + ".5",
    "0." + "1" * 400,
    "1E+0",
)
TEXTS = (
    "",
    "a",
    "abc",
    "tiny-llama",
    "text",
    "user",
    "none",
    "auto",
    "\x00",
    "é" * 50,
    "\ud800",
    "a\udc00b",
    "\ud83d\ude00",
    "\U0001f469\u200d\U0001f469",
    "x" * 300,
    "\n\n",
    "{{ 1 }}",
    "</s>",
    "../../etc/passwd",
    "a" * 1025,
    "ab" * 3000,
)
WORDS = ("null", "true", "false", "[]", "{}", '""', "[null]", "[[]]", "[{}]", "{}}", "nul", "")
FIELDS = (
    "model",
    "prompt",
    "messages",
    "input",
    "tokens",
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "xtc_probability",
    "xtc_threshold",
    "use_beam_search",
    "length_penalty",
    "early_stopping",
    "seed",
    "stop",
    "stop_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "allowed_token_ids",
    "bad_words",
    "bad_words_ids",
    "no_repeat_ngram_size",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "dry_breaker_ids",
    "prompt_logprobs",
    "priority",
    "ttft_ms",
    "tbt_ms",
    "cache_salt",
    "cache_priority",
    "return_token_ids",
    "stream",
    "stream_options",
    "user",
    "echo",
    "logprobs",
    "best_of",
    "suffix",
    "add_special_tokens",
    "max_completion_tokens",
    "top_logprobs",
    "chat_template_kwargs",
    "add_generation_prompt",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "response_format",
    "instructions",
    "include",
    "max_output_tokens",
    "metadata",
    "store",
    "text",
    "truncation",
    "reasoning",
    "background",
    "previous_response_id",
    "conversation",
    "system",
    "stop_sequences",
    "thinking",
    "output_config",
    "encoding_format",
    "dimensions",
    "return_token_strs",
    "prompt_embeds",
    "nobody_knows",
    "",
    "\ud800",
)
VALID: dict[str, Pairs] = {
    "/v1/completions": [("prompt", '"abc"'), ("max_tokens", "2")],
    "/v1/chat/completions": [("messages", '[{"role":"user","content":"hi"}]'), ("max_tokens", "2")],
    "/v1/responses": [("input", '"hi"'), ("max_output_tokens", "2")],
    "/v1/responses/input_tokens": [("input", '"hi"')],
    "/v1/messages": [("messages", '[{"role":"user","content":"hi"}]'), ("max_tokens", "2")],
    "/v1/messages/count_tokens": [("messages", '[{"role":"user","content":[{"type":"text","text":"hi"}]}]')],
    "/v1/embeddings": [("input", '["a", "b"]')],
    "/tokenize": [("prompt", '"abc"')],
    "/detokenize": [("tokens", "[5, 6]")],
}
TYPES = (
    "text/plain",
    "",
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "application/json; charset=utf-16",
    "a/b/c;;",
)


def a_text(rng: random.Random) -> str:
    """Return a text as JSON, escaped or, where it can be, as it is."""
    text = rng.choice(TEXTS)
    if rng.random() < 0.3:
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(text)


def _long_list(rng: random.Random) -> str:
    """Return a list with one wrong element far from its beginning."""
    each = rng.choice(("1", '"a"', "[1]", '{"role":"user","content":"a"}', "{}", "[]", "1.0", "null"))
    return "[" + f"{each}," * rng.choice((10, 300, 3000, 20_000)) + a_value(rng, 4) + "]"


def _deep(rng: random.Random) -> str:
    count = rng.choice((5, 100, 900, 1100, 20_000))
    opening, closing = rng.choice((("[", "]"), ('{"a":', "}"), ('[{"content":', "}]")))
    return opening * count + a_value(rng, 4) + closing * (count if rng.random() < 0.8 else count - 1)


def a_value(rng: random.Random, depth: int = 0) -> str:
    """A value as JSON, or as what is hardly JSON."""
    kind = rng.random()
    if kind < 0.3 or depth > 3:
        return rng.choice((rng.choice(NUMBERS), a_text(rng), rng.choice(WORDS)))
    if kind < 0.5:
        return rng.choice(NUMBERS)
    if kind < 0.65:
        return a_text(rng)
    if kind < 0.75:
        return "[" + ",".join(a_value(rng, depth + 1) for _ in range(rng.randint(0, 4))) + "]"
    if kind < 0.9:
        names = ("role", "content", "type", "text", "name", "5", "include_usage", "format", "effort", "a", "a")
        return an_object([(rng.choice(names), a_value(rng, depth + 1)) for _ in range(rng.randint(0, 4))])
    return _deep(rng) if rng.random() < 0.4 else _long_list(rng)


def an_object(pairs: Pairs) -> str:
    return "{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in pairs) + "}"


@dataclass(frozen=True)
class Call:
    """A request over HTTP; is_chunked: its body comes in chunks, and no header says how long it is."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)
    is_chunked: bool = False


def a_call(rng: random.Random) -> Call:
    """A valid body in which some fields are something else, and seldom more than its fields."""
    path = rng.choice(tuple(VALID))
    pairs = [pair for pair in VALID[path] if rng.random() < 0.9]
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        pairs.insert(rng.randint(0, len(pairs)), (rng.choice(FIELDS), a_value(rng)))
    if pairs and rng.random() < 0.1:
        pairs.append((pairs[0][0], a_value(rng)))
    data = an_object(pairs).encode("utf-8", "surrogatepass")
    headers = {"content-type": "application/json"}
    kind = rng.random()
    if kind < 0.05:
        data = damaged(data, rng)
    elif kind < 0.08:
        headers["content-type"] = rng.choice(TYPES)
    elif kind < 0.1:
        data = a_value(rng).encode("utf-8", "surrogatepass")
    elif kind < 0.12:
        data = b"\xef\xbb\xbf" + data if rng.random() < 0.5 else data.decode("utf-8", "replace").encode("utf-16")
    elif kind < 0.14:
        headers["content-encoding"] = "gzip"
    elif kind < 0.16:
        data += b" " * 70_000  # as a large one, which is read in pieces
    return Call(path, data, headers, is_chunked=rng.random() < 0.1)


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Some bytes flipped, cut off, repeated, or put elsewhere."""
    result = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(result) + 1)
        kind = rng.randrange(5)
        if kind == 0 and at < len(result):
            result[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            result = result[:at]
        elif kind == 2:
            result[at:at] = result[at : at + rng.randint(1, 20)] * rng.randint(1, 5)
        elif kind == 3:
            result[at:at] = rng.randbytes(rng.randint(1, 12))
        elif len(result) > 2:
            del result[at : at + rng.randint(1, 8)]
    return bytes(result)


# -------------------------------------------------------------------------------------------------------- gRPC


def a_tensor_call(rng: random.Random, infer: Any) -> bytes:
    """A ModelInferRequest (`infer` is its class) whose sampling parameters are JSON of the same kind."""
    pairs = [(rng.choice(FIELDS), a_value(rng)) for _ in range(rng.randint(0, 3))]
    given = [("text_input", b"abc"), ("sampling_parameters", an_object(pairs).encode("utf-8", "surrogatepass"))]
    tensor = infer.InferInputTensor
    return bytes(
        infer(
            inputs=[tensor(name=name, datatype="BYTES", shape=[1]) for name, _ in given],
            raw_input_contents=[struct.pack("<I", len(data)) + data for _, data in given],
        ).SerializeToString()
    )


def a_flood(rng: random.Random) -> bytes:
    """Very many fields of a few bytes: empty messages, texts, numbers, packed or not."""
    field_number, count = rng.randint(1, 15), rng.choice((100, 5000, 40_000))
    piece: Callable[[], bytes] = rng.choice(
        (
            lambda: bytes([field_number << 3 | 2, 0]) * count,
            lambda: bytes([field_number << 3, 5]) * count,
            lambda: _within(field_number, bytes([0x0A, 0]) * count),
            lambda: _within(field_number, _within(1, b"\x05" * count)),
            lambda: _within(field_number, b"\xff" * count),
        )
    )
    return piece()


def _within(number: int, data: bytes) -> bytes:
    size, out = len(data), bytearray([number << 3 | 2])
    while size >= 0x80:
        out.append(size & 0x7F | 0x80)
        size >>= 7
    return bytes([*out, size]) + data
