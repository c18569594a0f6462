"""Keys, rates and limits, on a clock of the test's; and the forecast of the queue."""

import json
from pathlib import Path
from typing import Any

import pytest

from inferc.errors import ConfigError, RequestError
from inferc.runtime.openai.request import COMPLETIONS, parse_request
from inferc.runtime.step.sampling_params import SamplingParams, changed
from inferc.serve.errors import Forbidden, RateLimited, Unauthenticated
from inferc.serve.models.queue_forecast import QueueForecast
from inferc.serve.security import access
from inferc.serve.security.access import (
    Access,
    Bucket,
    Caller,
    Key,
    Limits,
    digest_of,
    make_secret,
    read_keys,
    write_keys,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def key(name: str = "a", secret: str = "s", **more: Any) -> Key:
    return Key(name, digest_of(secret), **more)


# ------------------------------------------------------------------------------------------------------ rates


def test_a_bucket_grows_back_evenly_and_holds_a_minute() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.wait_for(1) == pytest.approx(1.0)
    clock.now += 0.5
    assert bucket.wait_for(1) == pytest.approx(0.5)
    clock.now += 1000
    assert bucket.left == 60 and bucket.wait_for(60) == 0
    bucket.take(90)
    assert bucket.wait_for(1) == pytest.approx(31.0)
    assert bucket.wait_for(10_000) == pytest.approx(90.0), "what it can never hold waits for all that it can"


def test_requests_and_tokens_of_a_key_are_bounded() -> None:
    clock = Clock()
    caller = Caller(key(requests_per_minute=2, tokens_per_minute=100, max_concurrent=2), Limits(), clock)
    params = SamplingParams(max_tokens=5)
    caller.begin(10, params)
    caller.begin(10, params)
    with pytest.raises(RateLimited, match="has 2 requests under way, and 2 are allowed at once"):
        caller.begin(10, params)
    caller.end(0)
    with pytest.raises(RateLimited, match="used its 2 requests a minute; try again in 30 s") as raised:
        caller.begin(10, params)
    assert raised.value.retry_after == pytest.approx(30.0)
    clock.now += 30
    caller.begin(10, params)
    caller.end(200)  # more than a minute's worth: a debt
    clock.now += 30
    with pytest.raises(RateLimited, match="used its 100 tokens a minute"):
        caller.begin(1, params)
    headers = dict(caller.headers())
    assert headers[b"x-ratelimit-limit-requests"] == b"2" and headers[b"x-ratelimit-remaining-tokens"] == b"0"


def test_what_generates_nothing_is_bounded_as_well() -> None:
    caller = Caller(key(tokens_per_minute=100), Limits(max_prompt_tokens=60, max_output_tokens=1, max_n=2), Clock())
    for prompt_len, n, message in ((61, 1, "the prompt has 61 tokens"), (1, 3, "n is 3; at most 2")):
        with pytest.raises(RequestError, match=message):
            caller.begin_reading(prompt_len, n)
    assert caller.num_open == 0
    caller.begin_reading(60, 2, num_tokens=100)
    assert caller.num_open == 1
    with pytest.raises(RateLimited, match="used its 100 tokens a minute"):
        caller.begin_reading(1)


def test_a_key_speaks_in_its_own_name_and_salt() -> None:
    caller = Caller(key("alice", salted=True), Limits())
    params = caller.begin(5, SamplingParams(client="somebody", cache_salt="mine"))
    other = Caller(key("bob", "t", salted=True), Limits()).begin(5, SamplingParams(cache_salt="mine"))
    assert params.client == "alice" and params.cache_salt != other.cache_salt
    assert Caller(key(), Limits()).begin(5, SamplingParams(cache_salt="mine")).cache_salt == "mine"
    assert Caller(None, Limits()).begin(5, SamplingParams(client="me")).client == "me"


def test_limits_of_a_request() -> None:
    limits = Limits(max_prompt_tokens=10, max_output_tokens=20, max_n=2)
    assert limits.apply(10, SamplingParams(max_tokens=20, n=2)).max_tokens == 20
    assert limits.apply(10, SamplingParams(max_tokens=None)).max_tokens == 20
    assert Limits().apply(10, SamplingParams(max_tokens=None)).max_tokens is None
    for prompt, params, message in (
        (11, SamplingParams(), "the prompt has 11 tokens, and 10 are allowed here"),
        (1, SamplingParams(max_tokens=21), "max_tokens is 21; at most 20 is allowed here"),
        (1, SamplingParams(n=3), "n is 3; at most 2 is allowed here"),
        (1, SamplingParams(max_tokens=None, min_tokens=21), "min_tokens is 21; at most 20 is allowed here"),
    ):
        with pytest.raises(RequestError, match=message):
            limits.apply(prompt, params)
    assert limits.defaults({"top_k": 5, "max_tokens": 2048}) == {"top_k": 5, "max_tokens": 20}
    assert limits.defaults({"max_tokens": None}) == {"max_tokens": 20}
    assert limits.defaults({"min_tokens": 30, "max_tokens": 40}) == {"min_tokens": 20, "max_tokens": 20}
    assert limits.defaults({})["max_tokens"] == 16 and Limits(max_output_tokens=5).defaults({})["max_tokens"] == 5
    assert Limits().defaults({"max_tokens": 2048}) == {"max_tokens": 2048}
    narrower = limits.over(Limits(max_prompt_tokens=5, max_n=9, max_request_seconds=3.0))
    assert narrower == Limits(5, 20, 2, 3.0)
    with pytest.raises(ConfigError, match="max_n is 0; expected a number above 0"):
        Limits(max_n=0)
    with pytest.raises(ConfigError, match=r"max_output_tokens is 1.5; expected a whole number"):
        Limits(max_output_tokens=1.5)  # type: ignore[arg-type]


def test_only_admins_do_what_is_theirs() -> None:
    Caller(None, Limits()).check_admin()
    Caller(key(admin=True), Limits()).check_admin()
    with pytest.raises(Forbidden, match="key 'a' may not do this"):
        Caller(key(), Limits()).check_admin()


# ------------------------------------------------------------------------------------------------- the file


def test_keys_come_and_go_while_counts_stay(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "keys.json", Clock()
    write_keys(file, [key("a", "one"), key("b", "two", requests_per_minute=5)])
    assert file.stat().st_mode & 0o777 == 0o600 and "one" not in file.read_text()
    known = Access(file, clock=clock)
    first = known.caller("two")
    for none in (None, "", "three", "two "):
        with pytest.raises(Unauthenticated):
            known.caller(none)
    write_keys(file, [key("b", "two", requests_per_minute=5), key("c", "three")])
    clock.now += access.LOOK_SECONDS
    assert known.caller("three").name == "c" and known.caller("two") is first
    with pytest.raises(Unauthenticated, match="not known here, or not any more"):
        known.caller("one")
    file.write_text("{")
    clock.now += access.LOOK_SECONDS
    assert known.caller("two") is first and "the API keys stay as they were" in caplog.text
    file.unlink()
    clock.now += access.LOOK_SECONDS
    assert known.caller("three").name == "c"


def test_a_key_that_changes_gets_back_what_its_open_requests_hold(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys.json", Clock()
    write_keys(file, [key("a", "one", max_concurrent=2)])
    known = Access(file, clock=clock)
    before = known.caller("one")
    for _ in range(2):
        before.begin(1, SamplingParams())
    write_keys(file, [key("a", "one", max_concurrent=2, tokens_per_minute=100)])
    clock.now += access.LOOK_SECONDS
    with pytest.raises(RateLimited, match="has 2 requests under way"):
        known.caller("one").begin(1, SamplingParams())
    for _ in range(2):  # as those do that began with the key as it was
        before.end(30)
    known.caller("one").begin(1, SamplingParams())
    headers = dict(known.caller("one").headers())
    assert headers[b"x-ratelimit-remaining-tokens"] == b"39"


def test_a_key_ends_on_its_day() -> None:
    assert key(expires="2020-01-01").is_over and not key(expires="2999-01-01").is_over and not key().is_over


def test_secrets_are_long_and_never_twice() -> None:
    made = {make_secret() for _ in range(100)}
    assert len(made) == 100 and all(secret.startswith("ik-") and len(secret) > 40 for secret in made)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("{", "the API keys are not JSON"),
        ([], 'expected {"keys": […]}'),
        ({"keys": [5]}, "keys[0]: expected an object, found 5"),
        ({"keys": [{"sha256": "a" * 64}]}, "keys[0]: a key needs a name"),
        ({"keys": [{"name": "a", "sha256": "A" * 64}]}, "sha256 of key a: expected 64 hexadecimal digits"),
        ({"keys": [{"name": "a", "sha256": "a" * 64, "rpm": 5}]}, "keys[0]: unknown field rpm; known: admin"),
        ({"keys": [{"name": "a", "sha256": "a" * 64, "admin": 1}]}, "admin is 1, which is of another kind"),
        ({"keys": [{"name": "a", "sha256": "a" * 64, "max_n": -1}]}, "max_n is -1; expected a number above 0"),
        ({"keys": [{"name": "a", "sha256": "a" * 64, "expires": "soon"}]}, "expires is 'soon'; expected a day"),
        ({"keys": [{"name": "a", "sha256": "a" * 64}] * 2}, "two keys have the name a"),
    ],
)
def test_files_that_are_none(tmp_path: Path, entries: Any, message: str) -> None:
    file = tmp_path / "keys.json"
    file.write_text(entries if isinstance(entries, str) else json.dumps(entries))
    with pytest.raises(ConfigError) as raised:
        read_keys(file)
    assert message in str(raised.value)


# ------------------------------------------------------------------------------------------------- the queue


def test_the_queue_is_as_long_as_others_have_waited() -> None:
    queue = QueueForecast()
    assert queue.seconds(0.0) == 0.0
    queue.came(20, 100.0)
    assert queue.seconds(103.0) == 3.0, "none has come: it is that at least"
    for step in range(10):
        queue.first_token(104.0 + step)  # one a second from now on
    assert queue.num_waiting == 10 and queue.seconds(113.0) == pytest.approx(10 * 10 / 10)
    queue.left(10)
    assert queue.seconds(114.0) == 0.0
    queue.came(1, 500.0)
    assert queue.seconds(500.0) == 0.0, "what was long ago says nothing of now"


def test_a_queue_that_moves_in_waves_is_not_measured_between_two() -> None:
    """256 sequences begin and end together, every 12 s: with 750 behind them the next waits for three waves."""
    queue = QueueForecast()
    queue.came(256 * 4, 0.0)
    for wave in range(4):
        for _ in range(256):
            queue.first_token(12.0 * wave)
        queue.came(256, 12.0 * wave)
    queue.left(queue.num_waiting - 750)
    for now in (36.1, 40.0, 47.9):
        assert 25 < queue.seconds(now, num_running=256) < 75, now
    queue.first_token(47.95)  # the first of the next wave
    assert 25 < queue.seconds(47.96, num_running=256) < 75


@pytest.mark.parametrize(
    "text", [b"[" * 100_000, b"\xff\xfe\x80", b'{"keys": ' + b"[" * 100_000, b'{"keys": [[]]}', b"null"]
)
def test_a_file_that_became_something_else_leaves_the_keys_as_they_were(
    text: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    write_keys(path, [key("a", "secret")])
    known = Access(path, clock=clock)
    path.write_bytes(text)
    clock.now += access.LOOK_SECONDS
    assert known.caller("secret").name == "a"
    assert "the API keys stay as they were: " in caplog.text and "Traceback" not in caplog.text
    clock.now += access.LOOK_SECONDS
    assert known.caller("secret").name == "a", "and are not read again and again"
    assert caplog.text.count("stay as they were") == 1


def test_parameters_that_were_checked_are_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parameters of a body are checked once, when it comes in, and not again when limits and a name are set."""
    body = {"prompt": "a", "max_tokens": 5}
    defaults = {"temperature": 0.0, "max_tokens": 9}
    params = parse_request(COMPLETIONS, body, is_served=True, defaults=defaults).params
    assert (params.temperature, params.max_tokens) == (0.0, 5)
    open_ended = changed(params, max_tokens=None)

    def check(self: SamplingParams) -> None:
        raise AssertionError("checked a second time")

    monkeypatch.setattr(SamplingParams, "__post_init__", check)
    caller = Caller(Key("me", "0" * 64, salted=True), Limits(max_output_tokens=7))
    ours = caller.begin(3, open_ended)
    assert (ours.client, ours.max_tokens, ours.cache_salt) == ("me", 7, "0" * 16 + ":")
    caller.end(0)
