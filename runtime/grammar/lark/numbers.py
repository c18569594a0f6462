"""Numbers between bounds as regular terms: integers, and decimals of up to six places, without an exponent."""

from __future__ import annotations

from decimal import Decimal

from inferc.runtime.grammar.schema.regex import EMPTY, NEVER, Term, alt, chars, literal, repeat, seq

PLACES = 6
DIGIT = chars([(48, 57)])
MINUS, POINT = literal("-"), literal(".")
WHOLE = alt((literal("0"), seq((chars([(49, 57)]), repeat(DIGIT, 0, None)))))
INTEGER = seq((repeat(MINUS, 0, 1), WHOLE))
_EXPONENT = seq((alt((literal("e"), literal("E"))), repeat(alt((literal("+"), MINUS)), 0, 1), repeat(DIGIT, 1, None)))
NUMBER = seq((INTEGER, repeat(seq((POINT, repeat(DIGIT, 1, None))), 0, 1), repeat(_EXPONENT, 0, 1)))

Bound = tuple[Decimal, bool] | None  # the number, and whether itself is outside


def between(low: Bound, high: Bound, places: int) -> Term:
    """Return the term of the numbers between two bounds with up to so many decimal places."""
    zero = Decimal(0)
    ways = []
    if high is None or high[0] > 0 or (high[0] == 0 and not high[1]):
        ways.append(_size(low if low is not None and low[0] >= 0 else None, high, places))
    if low is None or low[0] < 0:
        # Sizes of negative numbers: the bounds change places, and nothing is -0.
        least = (zero, True) if high is None or high[0] >= 0 else (-high[0], high[1])
        ways.append(seq((MINUS, _size(least, None if low is None else (-low[0], low[1]), places))))
    return alt(ways)


def _size(low: Bound, high: Bound, places: int) -> Term:
    """Return the term of numbers without a sign, between bounds that have none either."""
    if low is None:
        return _with_part(WHOLE, _ANY_PART, places) if high is None else _to(high, places)
    if high is None:
        return _from(low, places)
    first, last = int(low[0]), int(high[0])
    if first > last:
        return NEVER
    if first == last:
        part = _part(low, high, places)
        return seq((literal(str(first)), part))
    ways = [
        seq((literal(str(first)), _part(low, None, places))),
        seq((literal(str(last)), _part(None, high, places))),
    ]
    if last - first > 1:
        ways.append(_with_part(_whole_between(first + 1, last - 1), _ANY_PART, places))
    return alt(ways)


def _from(low: tuple[Decimal, bool], places: int) -> Term:
    whole = int(low[0])
    size = len(str(whole)) + 1
    longer = seq((chars([(49, 57)]), repeat(DIGIT, size - 1, None)))
    over = [_whole_between(whole + 1, 10 ** (size - 1) - 1)] if whole + 1 < 10 ** (size - 1) else []
    return alt(
        (seq((literal(str(whole)), _part(low, None, places))), _with_part(alt((*over, longer)), _ANY_PART, places))
    )


def _to(high: tuple[Decimal, bool], places: int) -> Term:
    whole = int(high[0])
    last = seq((literal(str(whole)), _part(None, high, places)))
    return alt((last, _with_part(_whole_between(0, whole - 1), _ANY_PART, places))) if whole else last


def _whole_between(low: int, high: int) -> Term:
    """Return the term of the whole numbers from `low` to `high`, neither below 0."""
    ways = []
    while low <= high:
        end = min(high, 10 ** len(str(low)) - 1)
        ways.append(_same_length(str(low), str(end)))
        low = end + 1
    return alt(ways)


def _same_length(low: str, high: str) -> Term:
    """Return the term of the digits between two texts of digits of the same length."""
    if not low:
        return EMPTY
    first, last, rest = low[0], high[0], len(low) - 1
    if first == last:
        return seq((literal(first), _same_length(low[1:], high[1:])))
    ways: list[Term] = []
    if low[1:].strip("0"):
        ways.append(seq((literal(first), _same_length(low[1:], "9" * rest))))
        first = chr(ord(first) + 1)
    if high[1:].strip("9"):
        ways.append(seq((literal(last), _same_length("0" * rest, high[1:]))))
        last = chr(ord(last) - 1)
    if first <= last:
        ways.append(seq((chars([(ord(first), ord(last))]), repeat(DIGIT, rest, rest))))
    return alt(ways)


def _with_part(whole: Term, part: Term, places: int) -> Term:
    return seq((whole, part)) if places else whole


_ANY_PART = repeat(seq((POINT, repeat(DIGIT, 1, PLACES))), 0, 1)


def _part(low: Bound, high: Bound, places: int) -> Term:
    """Return the term of what follows the whole number that bounds share: a point and digits, or nothing."""
    least, most = _scaled(low, places, up=True), _scaled(high, places, up=False)
    least, most = 0 if least is None else least, 10**places - 1 if most is None else most
    ways: list[Term] = [EMPTY] if least <= 0 <= most else []
    if places and least <= most:
        ways.append(seq((POINT, _digits(f"{least:0{places}}", f"{most:0{places}}"))))
    return alt(ways)


def _scaled(bound: Bound, places: int, up: bool) -> int | None:
    """Return the nearest part within a bound, in units of the last place; may be one outside of all parts."""
    if bound is None:
        return None
    number, is_outside = bound
    exact = (number - int(number)).scaleb(places)
    found = int(exact)
    if up:
        return found + 1 if is_outside or exact > found else found
    return found - 1 if is_outside and exact == found else found


def _digits(low: str, high: str) -> Term:
    """Return the term of one digit or more which, filled up with zeros, are between two texts of one length."""
    ways: list[Term] = []
    for count in range(1, len(low) + 1):
        # Of so many digits: those whose filled text is in between.
        first, last = int(low[:count]), int(high[:count])
        first += bool(low[count:].strip("0"))
        if first <= last:
            ways.append(_same_length(f"{first:0{count}}", f"{last:0{count}}"))
    return alt(ways)
