"""Requests that pages of other sites send: a browser asks first whether it may (CORS)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import run_inferc
from http_calls import Reply, request
from serving import Server

SITE = "https://chat.example.com"
BODY = {"prompt": "a", "max_tokens": 1}


def asked(url: str, origin: str) -> Reply:
    """Send what a browser sends before a page of `origin` may post JSON with a key."""
    headers = {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return request(url, "/v1/completions", headers=headers, method="OPTIONS")


@pytest.fixture(scope="module")
def of_sites(tiny_artifact: Path) -> Iterator[Server]:
    with Server(tiny_artifact, "--cors-origin", SITE, "--cors-origin", "http://localhost:3000") as server:
        yield server


@pytest.mark.parametrize("origin", [SITE, "http://localhost:3000"])
def test_a_page_of_a_named_site_may_ask(of_sites: Server, origin: str) -> None:
    may = asked(of_sites.url, origin)
    assert may.status == 200 and may.headers["access-control-allow-origin"] == origin
    assert "POST" in may.headers["access-control-allow-methods"]
    assert "authorization" in may.headers["access-control-allow-headers"]
    reply = request(of_sites.url, "/v1/completions", BODY, {"origin": origin})
    assert reply.status == 200 and reply.headers["access-control-allow-origin"] == origin
    assert "x-request-id" in reply.headers["access-control-expose-headers"]


def test_a_page_of_another_site_may_not(of_sites: Server) -> None:
    may = asked(of_sites.url, "https://evil.example")
    assert may.status == 400 and "access-control-allow-origin" not in may.headers
    assert "access-control-allow-origin" not in request(of_sites.url, "/version", headers={"origin": "null"}).headers


def test_without_the_option_no_page_may(url: str) -> None:
    assert "access-control-allow-origin" not in asked(url, SITE).headers
    assert "access-control-allow-origin" not in request(url, "/version", headers={"origin": SITE}).headers


@pytest.mark.parametrize("origin", ["chat.example.com", "https://chat.example.com/page", "https://"])
def test_what_is_no_origin_is_refused(tiny_artifact: Path, origin: str) -> None:
    done = run_inferc("serve", tiny_artifact, "--cors-origin", origin)
    assert done.returncode == 2
    assert done.stderr == f"inferc: --cors-origin {origin}: expected SCHEME://HOST or SCHEME://HOST:PORT, or *\n"
