"""The page's files as a browser asks for them, without one."""

from __future__ import annotations

import json
import re

from http_calls import request
from serving import Server

from inferc.serve.http.web_page import FOLDER


def test_the_page_needs_no_key_and_lets_nothing_in(server: Server) -> None:
    reply = request(server.url, "/")
    assert reply.status == 200 and reply.headers["content-type"].startswith("text/html")
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    again = request(server.url, "/", headers={"if-none-match": reply.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    for path in sorted(FOLDER.iterdir()):
        assert request(server.url, f"/web/{path.name}").body == path.read_bytes()
    for name in ("/web/none.js", "/web/..%2fweb_page.py", "/web/"):
        assert request(server.url, name).status == 404
    sources = "".join(path.read_text() for path in FOLDER.iterdir())
    assert not re.search(r"innerHTML|insertAdjacentHTML|eval\(|document\.write", sources)


def test_the_story_of_the_artifact_is_told_with_its_graphs(server: Server) -> None:
    report = json.loads(request(server.url, "/artifact").body)
    graphs = [row["graph"] for row in report["passes"] if row.get("graph")]
    text = request(server.url, f"/artifact/graphs/{graphs[-1]}")
    assert text.headers["content-type"].startswith("text/plain") and b"lm_head" in text.body
    unknown = request(server.url, "/artifact/graphs/none")
    assert unknown.status == 400 and graphs[-1].encode() in unknown.body, "it lists those that there are"
