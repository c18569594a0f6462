"""What the client refuses before it sends anything: no server runs here."""

from typing import Any

import pytest

from inferc.client import Client
from inferc.errors import RequestError


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([2**40], "token_ids[0] is 1099511627776; a token id is 0 to 2147483647"),
        ([5, -1], "token_ids[1] is -1"),
        ([True], "token_ids[0] is True; a token id is a whole number"),
        ([1, "a"], "token_ids[1] is 'a'"),
        (["a", "b"], "token_ids[0] is 'a'"),
        ([{"role": "user"}], "message 0 of the chat needs a content, a text; found none"),
        ([{"role": "user", "content": "hi"}, {"role": 5, "content": "hi"}], "message 1 of the chat needs a role"),
        ([{"role": "user", "content": ["parts"]}], "found ['parts']"),
        ([{"role": "user", "content": "hi"}, 7], "message 1 of the chat is 7"),
        (None, "a prompt is a text, a list of token ids or a list of chat messages, found None"),
        (b"bytes", "found b'bytes'"),
        (17, "found 17"),
        ("half of a pair \ud83d", "the request cannot be sent"),
        ([{"role": "user", "content": "\ud83d"}], "the request cannot be sent"),
    ],
)
def test_a_prompt_that_is_none(prompt: Any, message: str) -> None:
    with Client("127.0.0.1:1", timeout=1) as client, pytest.raises(RequestError) as raised:
        client.complete(prompt)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_token_ids_that_are_none() -> None:
    with Client("127.0.0.1:1", timeout=1) as client, pytest.raises(RequestError, match=r"token_ids\[1\] is 1\.5"):
        client.detokenize([1, 1.5])  # type: ignore[list-item]
