"""The header by which a client wishes for another protocol, wherever a head is cut."""

from __future__ import annotations

from inferc.serve.http.upgrades import Upgrades

HEAD = (
    b"POST /a HTTP/1.1\r\nhost: b\r\nUpgrade: h2c\r\nx: upgrade: \r\nupgrade: websocket\r\ncontent-length: 14\r\n\r\n"
)
WITHOUT = HEAD.replace(b"\r\nUpgrade:", b"\r\nx-upgrade:").replace(b"\r\nupgrade:", b"\r\nx-upgrade:")
BODY = b"\r\nupgrade: a\r\n"


def passed(upgrades: Upgrades, *pieces: bytes) -> bytes:
    """Return what comes of a head in pieces, after which nothing follows."""
    found = []
    for piece in pieces:
        head, rest = upgrades.passed_over(piece)
        assert not rest
        found.append(head)
    return b"".join(found)


def test_every_one_of_a_head_is_renamed_and_a_body_is_left_alone() -> None:
    upgrades = Upgrades()
    for _ in range(2):  # requests of one connection
        assert upgrades.passed_over(HEAD + BODY) == (WITHOUT, BODY) and not upgrades.is_within


def test_a_head_may_be_cut_anywhere() -> None:
    upgrades = Upgrades()
    for cut in range(1, len(HEAD)):
        assert passed(upgrades, HEAD[:cut], HEAD[cut:]) == WITHOUT
    assert passed(upgrades, *(bytes([byte]) for byte in HEAD)) == WITHOUT


def test_what_cannot_become_one_is_not_kept_back() -> None:
    assert passed(Upgrades(), b"GET /health HTTP/1.1\r\nuser") == b"GET /health HTTP/1.1\r\nuser"
