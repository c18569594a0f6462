"""The HTTP calls that load and unload LoRA adapters, as vLLM has them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse

from inferc.errors import RequestError, shown
from inferc.runtime.openai.request import model_of
from inferc.serve.http.bodies import described, read_body
from inferc.serve.models.models import Models
from inferc.serve.security.access import CALLER

# The fields of vLLM's bodies, with the values of those that ask for nothing.
LOADING: dict[str, tuple[Any, ...]] = {
    "lora_name": (),
    "lora_path": (),
    "model": (),
    "base_model_name": (None,),
    "lora_int_id": (None,),
    "load_inplace": (None, False),
    "is_3d_lora_weight": (None, False),
}


def adapters_routes(models: Models) -> APIRouter:
    """Return the routes, for keys with admin where the server has keys."""
    routes = APIRouter()

    @routes.post("/v1/load_lora_adapter", tags=["adapters"], openapi_extra=described("LoadAdapterBody"))
    async def load_lora_adapter(http: Request) -> PlainTextResponse:
        """Load a LoRA adapter from the folder of adapters; requests then name it as their model."""
        body = await _read(http)
        name, path = _text(body, "lora_name"), _text(body, "lora_path")
        await models.load_adapter(name, path, model_of(body))
        return PlainTextResponse(f"adapter {name} is loaded\n")

    @routes.post("/v1/unload_lora_adapter", tags=["adapters"], openapi_extra=described("UnloadAdapterBody"))
    async def unload_lora_adapter(http: Request) -> PlainTextResponse:
        """Take a LoRA adapter away from new requests; the running ones end with it."""
        body = await _read(http)
        name = _text(body, "lora_name")
        await models.unload_adapter(name, model_of(body))
        return PlainTextResponse(f"adapter {name} is unloaded\n")

    return routes


async def _read(http: Request) -> dict[str, Any]:
    CALLER.get().check_admin()
    body = (await read_body(http)).values
    for name, value in body.items():
        if name not in LOADING:
            raise RequestError(f"{name[:100]}: it is not known; expected lora_name and lora_path")
        if (neutral := LOADING[name]) and value not in neutral:
            raise RequestError(f"{name} is {shown(value)}, which is not built; leave it out")
    return dict(body)


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value:
        found = "nothing" if value is None else shown(value)
        raise RequestError(f"{name}: expected a text, found {found}")
    return value
