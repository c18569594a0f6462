"""The lines about fields of a body that nothing reads."""

import msgspec
import pytest

from inferc.runtime.openai.unknown_fields import MAX_WARNINGS, warnings_of

IGNORED = "is not known and was ignored"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("temprature", f"temprature {IGNORED}; did you mean temperature?"),
        ("zzz", f"zzz {IGNORED}"),
        ("é", f"é {IGNORED}"),
        ("\ud800", f"\\ud800 {IGNORED}"),  # half of a surrogate pair, which no answer can have
    ],
)
def test_a_field_is_named_as_an_answer_can_name_it(name: str, line: str) -> None:
    found = warnings_of({name: 1, "temperature": 1}, ["temperature"])
    assert found == (line,)
    assert msgspec.json.decode(msgspec.json.encode(found)) == [line]


def test_of_many_fields_some_are_named() -> None:
    found = warnings_of({f"zzz{number}": 1 for number in range(MAX_WARNINGS + 3)})
    assert len(found) == MAX_WARNINGS + 1 and found[-1] == "3 more fields are not known and were ignored"
