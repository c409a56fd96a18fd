"""The HTTP face: the OpenAI routes, health, readiness and metrics."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.responses import Response

from diptych.common.errors import ModelNotFoundError
from diptych.common.metrics import CONTENT_TYPE, Metrics
from diptych.router import http_errors
from diptych.router.faces import Door
from diptych.router.http_answer import GenerationResponse
from diptych.router.http_body import parse_object, read_body
from diptych.router.http_errors import json_response, retry_headers
from diptych.router.http_request_id import RequestIdMiddleware
from diptych.router.messages import ModelInfo
from diptych.router.openai_fields import UnknownFields
from diptych.router.openai_requests import Call, ChatCompletionRequest, CompletionRequest, chat_call, completion_call

EXPLAIN_HEADER = "x-diptych-explain"
LABEL_HEADER = "x-request-id"
MAX_LABEL_BYTES = 128


def create_app(door: Door, metrics: Metrics) -> FastAPI:
    """The ASGI application. `door` is the router's frontend; `metrics` is what /metrics shows."""
    app = FastAPI(title="Diptych", version=package_version(), docs_url=None, redoc_url=None)
    http_errors.install(app)
    _add_generation(app, door)
    _add_models(app, door)
    _add_operations(app, door, metrics)
    app.add_middleware(RequestIdMiddleware)
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def package_version() -> str:
    try:
        return version("diptych")
    except PackageNotFoundError:  # a bare checkout
        return "0"


def _add_generation(app: FastAPI, door: Door) -> None:
    unknown = UnknownFields()

    async def answer(request: Request, build: Callable[..., Call]) -> Response:
        body = parse_object(await read_body(request))
        explain = request.headers.get(EXPLAIN_HEADER, "0").lower() in ("1", "true")
        return GenerationResponse(door, build(body, label=_label(request), explain=explain, unknown=unknown))

    @app.post("/v1/chat/completions", openapi_extra=_body_schema("ChatCompletionRequest"))
    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat_call)

    @app.post("/v1/completions", openapi_extra=_body_schema("CompletionRequest"))
    async def completions(request: Request) -> Response:
        return await answer(request, completion_call)


def _add_models(app: FastAPI, door: Door) -> None:
    def shown(model: ModelInfo) -> dict[str, Any]:
        return {
            "id": model.id,
            "object": "model",
            "created": model.created,
            "owned_by": "diptych",
            "max_model_len": model.max_model_len,
        }

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response({"object": "list", "data": [shown(model) for model in door.models()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        for found in door.models():
            if found.id == name:
                return json_response(shown(found))
        raise ModelNotFoundError(f"model {name!r} is not served here", param="model")


def _add_operations(app: FastAPI, door: Door, metrics: Metrics) -> None:
    @app.get("/health")
    @app.get("/live")
    async def live() -> Response:
        """The process answers. Whether it can serve is /ready's to say."""
        return json_response({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        is_ready, reasons = door.ready()
        status = 200 if is_ready else 503
        return json_response({"ready": is_ready, "reasons": reasons}, status, retry_headers(status, None))

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(metrics.expose(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def show_version() -> Response:
        return json_response({"version": package_version()})


def _label(request: Request) -> str:
    """The caller's own id, if its header is fit to be one; the request_id of a body is checked by the frontend."""
    label = request.headers.get(LABEL_HEADER, "")
    return label if label.isascii() and label.isprintable() and len(label) <= MAX_LABEL_BYTES else ""


def _body_schema(model: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The routes read their bodies themselves (size, encoding and numbers are checked there); add the models' schemas."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(ChatCompletionRequest, "validation"), (CompletionRequest, "validation")],
            ref_template="#/components/schemas/{model}",
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema
