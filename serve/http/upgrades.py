"""The Upgrade header of HTTP/1.1 requests, which is hidden from the parser, as a server may ignore it.

`curl --http2` sends it ("h2c"), and the parser would take the request's body for data of the other protocol. Only the
parser knows where a body ends. So an Upgrade header in a request that comes in one piece with the preceding body is not
seen here, and that request is refused.
"""

from __future__ import annotations

import re

HEAD_END = b"\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
CUTS = (HEAD_END, b"\r\nupgrade:")  # a piece may end with the beginning of one of these


class Upgrades:
    """A filter for the heads of one connection, which come in pieces, that renames the Upgrade header.

    is_within: the last piece ended in the middle of a head.
    """

    def __init__(self) -> None:
        self.is_within = False
        self._kept = b""  # the end of the last piece, which may continue in the next one

    def passed_over(self, data: bytes) -> tuple[bytes, bytes]:
        """Return the next piece of a head, filtered, and the bytes after that head; a few bytes may be held back."""
        data = self._kept + data
        end = data.find(HEAD_END)
        self.is_within = end < 0
        end = len(data) - _num_begun(data) if self.is_within else end + len(HEAD_END)
        head, rest = data[:end], data[end:]
        self._kept, rest = (rest, b"") if self.is_within else (b"", rest)
        return UPGRADE.sub(rb"\r\nx-upgrade:", head), rest


def _num_begun(data: bytes) -> int:
    """Return how many bytes at the end of the data may be the beginning of one of CUTS."""
    longest = min(len(data), max(map(len, CUTS)) - 1)
    ends = ((count, data[-count:].lower()) for count in range(longest, 0, -1))
    return next((count for count, end in ends if any(cut.startswith(end) for cut in CUTS)), 0)
