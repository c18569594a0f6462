"""The formats of JSON Schema that are held to, each as a pattern of whole texts; all others are annotations.

Some admit less than their standard allows: no leap seconds, no quoted local parts or comments in addresses, no IPv4
within IPv6, labels of at most 39 characters without two hyphens in a row, and nothing beyond ASCII.
"""

from __future__ import annotations

from functools import lru_cache

from inferc.runtime.grammar.schema.ecma import pattern_term
from inferc.runtime.grammar.schema.regex import Term

_LEAP = "(0[48]|[2468][048]|[13579][26])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_CLOCK = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](\.[0-9]{{1,6}})?(Z|[+-]{_CLOCK})"
_DAYS = "([0-9]+Y([0-9]+M([0-9]+D)?)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_HOURS = "T([0-9]+H([0-9]+M([0-9]+S)?)?|[0-9]+M([0-9]+S)?|[0-9]+S)"
_LABEL = "[A-Za-z0-9](-?[A-Za-z0-9]){0,19}"
_HOST = rf"{_LABEL}(\.{_LABEL}){{0,5}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_EMAIL = rf"{_ATOM}+(\.{_ATOM}+)*@{_HOST}"
_OCTET = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_HEX = "[0-9a-fA-F]"
_WORD = f"{_HEX}{{1,4}}"
# After the words before `::` as many may follow as leave at least one word for it.
_IPV6 = "|".join(
    [f"({_WORD}:){{7}}{_WORD}", f"::(({_WORD}:){{0,6}}{_WORD})?"]
    + [f"({_WORD}:){{{n}}}:(({_WORD}:){{0,{6 - n}}}{_WORD})?" for n in range(1, 7)]
    + [f"({_WORD}:){{7}}:"]
)
_ENCODED = f"%{_HEX}{{2}}"
_FREE = "-A-Za-z0-9._~!$&'()*+,;="
_SEGMENT = f"([{_FREE}:@]|{_ENCODED})"
_AUTHORITY = rf"(([{_FREE}:]|{_ENCODED})*@)?([{_FREE}]|{_ENCODED})*(:[0-9]*)?"
_PATH = f"(/{_SEGMENT}*)*"
_ABSOLUTE = f"/({_SEGMENT}+{_PATH})?"
_TAIL = rf"(\?({_SEGMENT}|[/?])*)?(#({_SEGMENT}|[/?])*)?"
_URI = f"[A-Za-z][A-Za-z0-9+.-]*:(//{_AUTHORITY}{_PATH}|{_ABSOLUTE}|{_SEGMENT}+{_PATH}|){_TAIL}"
_RELATIVE = f"(//{_AUTHORITY}{_PATH}|{_ABSOLUTE}|([{_FREE}@]|{_ENCODED})+{_PATH}|){_TAIL}"
_POINTER = "(/([^~/]|~[01])*)*"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P([0-9]+W|{_DAYS}({_HOURS})?|{_HOURS})",
    "email": _EMAIL,
    "idn-email": _EMAIL,
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "ipv4": rf"({_OCTET}\.){{3}}{_OCTET}",
    "ipv6": _IPV6,
    "uri": _URI,
    "iri": _URI,
    "uri-reference": f"({_URI}|{_RELATIVE})",
    "iri-reference": f"({_URI}|{_RELATIVE})",
    "uuid": f"{_HEX}{{8}}-({_HEX}{{4}}-){{3}}{_HEX}{{12}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
}


@lru_cache(maxsize=len(FORMATS))
def format_term(name: str) -> Term:
    """Return the term of the texts that have a format of `FORMATS`."""
    return pattern_term(f"^({FORMATS[name]})$")
