"""The wish of HTTP/1.1 clients for another protocol, passed over as a server may.

`curl --http2` sends it ("h2c"), and the parser would take the body behind it for that protocol's. Where a body ends only the
parser knows: a wish in a request that comes in one piece with the body before it is not seen, and refused.
"""

from __future__ import annotations

import re

HEAD_END = b"\r\n\r\n"
UPGRADE = re.compile(rb"\r\nupgrade:", re.IGNORECASE)
CUTS = (HEAD_END, b"\r\nupgrade:")  # of which a piece of a head may hold the beginning


class Upgrades:
    """The heads of one connection, in pieces, with the header renamed. is_within: the last piece ended in the middle of a head."""

    def __init__(self) -> None:
        self.is_within = False
        self._kept = b""  # the end of a piece, which the next one may go on with

    def passed_over(self, data: bytes) -> tuple[bytes, bytes]:
        """The next piece of a head, and what follows that head; bytes at the end of a piece may come with the next."""
        data = self._kept + data
        end = data.find(HEAD_END)
        self.is_within = end < 0
        end = len(data) - _num_begun(data) if self.is_within else end + len(HEAD_END)
        head, rest = data[:end], data[end:]
        self._kept, rest = (rest, b"") if self.is_within else (b"", rest)
        return UPGRADE.sub(rb"\r\nx-upgrade:", head), rest


def _num_begun(data: bytes) -> int:
    """How many bytes at the end may be the beginning of what is looked for."""
    longest = min(len(data), max(map(len, CUTS)) - 1)
    ends = ((count, data[-count:].lower()) for count in range(longest, 0, -1))
    return next((count for count, end in ends if any(cut.startswith(end) for cut in CUTS)), 0)
