"""The web page at `/` with a playground, a dashboard and a report about the artifact.

Its files are served as they are written, without a build step, and send requests to this server only. The files need no
API key; their requests use the key that the user typed in.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from inferc.errors import ArtifactError
from inferc.serve.http.artifact_report import READING, artifact_report, graph_text
from inferc.serve.models.models import Models

log = logging.getLogger(__name__)

FOLDER = Path(__file__).with_name("web")
FILES = "/web/"  # URL of the page's files
MEDIA_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page may load from and connect to this server only; no other site may frame it; text of a model never runs as
# code.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # revalidated each time (304), so that after an upgrade all files are new
}


@dataclass(frozen=True)
class PageFile:
    data: bytes
    media_type: str
    etag: str

    @staticmethod
    def read(path: Path) -> PageFile:
        data = path.read_bytes()
        return PageFile(data, MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(data).hexdigest()[:32]}"')

    def answer(self, headers: Mapping[str, str]) -> Response:
        more = {**HEADERS, "etag": self.etag}
        if self.etag in headers.get("if-none-match", ""):
            return Response(status_code=304, headers=more)
        return Response(self.data, media_type=self.media_type, headers=more)


def is_page(path: str) -> bool:
    """Return whether a path is part of the page, which needs no API key."""
    return path == "/" or path.startswith(FILES)


def page_routes(models: Models) -> APIRouter:
    """Return the routes of the page's files and of the reports about artifacts."""
    files = {path.name: PageFile.read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in MEDIA_TYPES}
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def index(request: Request) -> Response:
        return files["index.html"].answer(request.headers)

    @routes.get(FILES + "{name}", include_in_schema=False)
    async def file(name: str, request: Request) -> Response:
        if name not in files:
            raise HTTPException(404, f"the page has no file {name!r:.80}")
        return files[name].answer(request.headers)

    @routes.get("/artifact", tags=["server"])
    async def artifact(model: str = "") -> Response:
        """Report what the compiler did: passes, certificate, memory, kernels."""
        found = await artifact_report(models.get(model))
        return Response(json.dumps(found).encode(), media_type="application/json")

    @routes.get("/artifact/graphs/{name}", tags=["server"])
    async def graph(name: str, model: str = "") -> Response:
        """Return the program after a pass, as text."""
        try:
            text = await READING.run(partial(graph_text, models.get(model).artifact, name))
        except ArtifactError as error:
            log.error("%s", error)
            raise HTTPException(503, f"graph {name!r:.80} cannot be read: its file is damaged or gone") from None
        return Response(text, media_type="text/plain; charset=utf-8")

    return routes
