"""The start of a server: while the models are loaded, the HTTP modules are imported."""

import asyncio
import importlib
from pathlib import Path

import pytest

from inferc.serve import server as serving
from inferc.serve.models.served_model import ModelSource
from inferc.serve.open_files import ConnectionLimits


def test_a_model_is_not_loaded_on_when_the_import_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    async def load_all() -> None:
        try:
            seen.append("loads")
            await asyncio.Event().wait()
        finally:
            seen.append("is over")

    def import_module(name: str) -> None:
        raise ImportError(f"no {name}")

    async def work() -> None:
        config = serving.ServeConfig((ModelSource("m", tmp_path),), grpc_port=0, http_port=0)
        server = serving._Server(config, ConnectionLimits(http=8, grpc=8))
        monkeypatch.setattr(server.models, "load_all", load_all)
        try:
            with pytest.raises(ImportError, match=r"no inferc\.serve\.http\.server"):
                await server._load()
            assert seen == ["loads", "is over"]
        finally:
            await server.close()

    monkeypatch.setattr(importlib, "import_module", import_module)
    asyncio.run(work())
