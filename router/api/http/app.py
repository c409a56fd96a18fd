"""The HTTP server: the OpenAI routes, health, readiness and metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from diptych.common.errors import DiptychError, InvalidRequestError
from diptych.common.observe.metrics import CONTENT_TYPE, Metrics
from diptych.common.observe.tracing import TRACEPARENT
from diptych.common.store.adapters import lost_versions, other_base_models
from diptych.router.adapters.operations import LoadRequest
from diptych.router.adapters.resolution import unknown_model
from diptych.router.api.auth.authenticator import Authenticator, current_caller, require_admin
from diptych.router.api.auth.limits import MeteredRouterApi
from diptych.router.api.http.guard import GuardMiddleware
from diptych.router.api.http.request_id import RequestIdMiddleware
from diptych.router.api.http.response import GenerationResponse
from diptych.router.api.http.routes import add_index
from diptych.router.api.interface import RouterApi
from diptych.router.api.json_body import Bodies, read_body
from diptych.router.api.openai import errors
from diptych.router.api.openai.adapters import (
    CanaryLoraAdapterRequest,
    LoadLoraAdapterRequest,
    PromoteLoraAdapterRequest,
    RollbackLoraAdapterRequest,
    UnloadLoraAdapterRequest,
    shown_adapter,
)
from diptych.router.api.openai.errors import (
    WARNING_HEADER,
    bug_response,
    error_response,
    gone_response,
    json_response,
    retry_headers,
    warning_headers,
)
from diptych.router.api.openai.fields import UnknownFields
from diptych.router.api.openai.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    ParsedRequest,
    chat_call,
    completion_call,
    note_unknown,
    validate,
)
from diptych.router.api.openai.responses import ResponsesRequest, responses_call
from diptych.router.api.openai.tokenize import DetokenizeRequest, TokenizeRequest, tokenize_spec
from diptych.router.observe.access_log import current_access
from diptych.router.observe.adapter_metrics import seen_exposition
from diptych.router.observe.status_page import Status, add_status
from diptych.router.processes.siblings import Siblings
from diptych.router.requests.messages import ModelInfo, UncheckedRequest

EXPLAIN_HEADER = "x-diptych-explain"
LABEL_HEADER = "x-request-id"
IDEMPOTENCY_HEADER = "idempotency-key"
RESUME_HEADER = "last-event-id"
MAX_LABEL_BYTES = 128
EXPOSED_HEADERS = [
    LABEL_HEADER, WARNING_HEADER, "retry-after", "retry-after-ms",
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("tokens", "requests")),
]  # fmt: skip
"""Response headers that scripts of other origins may read."""
_BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    DetokenizeRequest,
    LoadLoraAdapterRequest,
    UnloadLoraAdapterRequest,
    CanaryLoraAdapterRequest,
    PromoteLoraAdapterRequest,
    RollbackLoraAdapterRequest,
)
_AdapterBody = TypeVar("_AdapterBody", bound=BaseModel)


class _TextConvertor(PathConvertor):
    """The rest of a path, whatever it holds: that of a path ends at a line break."""

    regex = "(?s:.*)"


register_url_convertor("text", _TextConvertor())


class _App(FastAPI):
    """The application. Requests for answers go to their endpoints at once: the framework's routing and middleware, which
    do nothing for them, cost as much as a placement. Every other request, or method, takes its way."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.answers: dict[str, Callable[[Request], Awaitable[Response]]] = {}
        """By path, of POST."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self.answers.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if endpoint is None:
            await super().__call__(scope, receive, send)
            return
        try:
            response = await endpoint(Request(scope, receive, send))
        except DiptychError as error:
            response = error_response(error)
        except ClientDisconnect:
            response = gone_response()
        except Exception:
            await bug_response()(scope, receive, send)
            raise
        await response(scope, receive, send)


def create_app(
    router_api: RouterApi,
    metrics: Metrics,
    quotas: MeteredRouterApi | None = None,
    status: Status | None = None,
    bodies: Bodies | None = None,
    *,
    refuse_unknown_fields: bool = False,
    event_ids: bool = True,
    parsing: Callable[[], AbstractContextManager[None]] = nullcontext,
    siblings: Siblings | None = None,
) -> FastAPI:
    """The ASGI application.

    Args:
        router_api: the router's frontend.
        metrics: the content of /metrics.
        quotas: sent in response headers, if given.
        status: the content of the status page, if given.
        bodies: parses large bodies; closed by its owner.
        refuse_unknown_fields: reject them; else name them in a response header.
        event_ids: streams have ids.
        parsing: entered while the body of a request for an answer is read; an error leaves it.
        siblings: the other processes of this router, which /metrics and /status.json speak for, too.
    """
    app = _App(title="Diptych", version=package_version(), docs_url=None, redoc_url=None, redirect_slashes=False)
    errors.install(app)
    bodies = bodies or Bodies()
    unknown = UnknownFields(refuse=refuse_unknown_fields)
    _add_generation(app, router_api, bodies, quotas, unknown, parsing, event_ids=event_ids)
    _add_tokens(app, router_api, bodies, unknown)
    _add_models(app, router_api)
    _add_adapters(app, router_api, bodies)
    _add_sessions(app, router_api)
    _add_operations(app, router_api, metrics, siblings)
    if status is not None:
        add_status(app, status, package_version(), siblings)
    add_index(app, package_version())
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def guarded(
    app: ASGIApp, keys: Authenticator | None, *, open_metrics: bool = False, cors_origins: Sequence[str] = ()
) -> ASGIApp:
    """The application behind the checks that precede routing.

    Args:
        keys: None: no keys are required.
        open_metrics: /metrics and /ready require no key.
        cors_origins: web pages from there may use the API; preflight requests carry no key.
    """
    app = GuardMiddleware(app, keys, open_metrics=open_metrics)
    if cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    return RequestIdMiddleware(app)


def package_version() -> str:
    try:
        return version("diptych")
    except PackageNotFoundError:  # a checkout that is not installed
        return "0"


def _add_generation(
    app: _App,
    router_api: RouterApi,
    bodies: Bodies,
    quotas: MeteredRouterApi | None,
    unknown: UnknownFields,
    parsing: Callable[[], AbstractContextManager[None]],
    *,
    event_ids: bool,
) -> None:
    def limits(tenant: str) -> dict[str, str]:
        return {} if quotas is None else quotas.headers(tenant)

    async def answer(request: Request, build: Callable[..., ParsedRequest]) -> Response:
        tenant = current_caller.get().tenant

        def made(body: dict[str, Any]) -> ParsedRequest:
            return build(body, features=router_api.features(body.get("model"), tenant), unknown=unknown)

        with parsing():
            call = await bodies.object_of(await read_body(request), made)
        _add_headers(request, call)
        # A whole answer has no ids: its caller asks again with its idempotency key.
        call.spec.resumable = not call.more and bool((event_ids and call.stream) or call.spec.idempotency_key)
        return GenerationResponse(router_api, call, event_ids=event_ids, extra_headers=limits)

    async def chat_completions(request: Request) -> Response:
        return await answer(request, chat_call)

    async def completions(request: Request) -> Response:
        return await answer(request, completion_call)

    async def responses(request: Request) -> Response:
        return await answer(request, responses_call)

    for path, schema, endpoint in (
        ("/v1/chat/completions", "ChatCompletionRequest", chat_completions),
        ("/v1/completions", "CompletionRequest", completions),
        ("/v1/responses", "ResponsesRequest", responses),
    ):
        app.post(path, openapi_extra=_body_schema(schema))(endpoint)
        app.answers[path] = endpoint


def _add_tokens(app: FastAPI, router_api: RouterApi, bodies: Bodies, unknown: UnknownFields) -> None:
    @app.post("/tokenize", openapi_extra=_body_schema("TokenizeRequest"))
    async def tokenize(request: Request) -> Response:
        tenant = current_caller.get().tenant

        def made(body: dict[str, Any]) -> tuple[UncheckedRequest, bool, dict[str, str]]:
            warning = warning_headers(note_unknown(TokenizeRequest, body, {}, unknown))
            return *tokenize_spec(body, router_api.features(body.get("model"), tenant)), warning

        spec, with_texts, warning = await bodies.object_of(await read_body(request), made)
        spec.tenant = tenant
        tokens, model = await router_api.tokenize(spec), str(spec.model)
        bytes_of = router_api.tokens(model, tenant).of
        there = router_api.models(tenant)
        length = next((one.max_model_len for one in there if one.id == model), there[0].max_model_len)

        def answer() -> Response:
            texts = [bytes_of(token).decode("utf-8", "replace") for token in tokens] if with_texts else None
            content = {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": texts}
            return json_response(content, headers=warning)

        return await bodies.off_loop(answer, 4 * len(tokens))

    @app.post("/detokenize", openapi_extra=_body_schema("DetokenizeRequest"))
    async def detokenize(request: Request) -> Response:
        def made(body: dict[str, Any]) -> tuple[DetokenizeRequest, dict[str, str]]:
            warning = warning_headers(note_unknown(DetokenizeRequest, body, {}, unknown))
            return validate(DetokenizeRequest, body), warning

        body, warning = await bodies.object_of(await read_body(request), made)
        text = await router_api.detokenize(body.model, body.tokens, current_caller.get().tenant)
        return json_response({"prompt": text}, headers=warning)


def _add_models(app: FastAPI, router_api: RouterApi) -> None:
    def shown(model: ModelInfo) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "id": model.id,
            "object": "model",
            "created": model.created,
            "owned_by": "diptych",
            "max_model_len": model.max_model_len,
        }
        return fields | ({"parent": model.parent, "root": model.root} if model.parent else {})

    @app.get("/v1/models")
    async def models() -> Response:
        there = router_api.models(current_caller.get().tenant)
        return json_response({"object": "list", "data": [shown(model) for model in there]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        there = router_api.models(current_caller.get().tenant)
        for found in there:
            if found.id == name:
                return json_response(shown(found))
        adapters = [one.id for one in there if one.parent]
        raise unknown_model(name, [one.id for one in there if not one.parent], adapters)


def _add_adapters(app: FastAPI, router_api: RouterApi, bodies: Bodies) -> None:
    """Loading and unloading as vLLM has them, and the versions of a name. Changes need an admin key."""

    async def given(request: Request, model: type[_AdapterBody]) -> _AdapterBody:
        require_admin(current_caller.get())
        return await bodies.object_of(await read_body(request), lambda body: validate(model, body))

    @app.post("/v1/load_lora_adapter", openapi_extra=_body_schema("LoadLoraAdapterRequest"))
    async def load_lora_adapter(request: Request) -> Response:
        """Loads an adapter at the workers, and serves it under its name."""
        body = await given(request, LoadLoraAdapterRequest)
        entry = await router_api.adapters.load(LoadRequest(**body.model_dump(exclude={"is_3d_lora_weight"})))
        lost = lost_versions((one.number, one.adapter_id, one.folder) for one in entry.versions)
        other = other_base_models(entry.model, ((one.number, one.other_base) for one in entry.versions))
        texts = [f"Success: LoRA adapter '{entry.name}' added successfully."]
        texts += [f"Warning: {warning}" for warning in (lost, other) if warning]
        return PlainTextResponse(" ".join(texts))

    @app.post("/v1/unload_lora_adapter", openapi_extra=_body_schema("UnloadLoraAdapterRequest"))
    async def unload_lora_adapter(request: Request) -> Response:
        """Serves the adapter no longer. Requests that have it end well."""
        body = await given(request, UnloadLoraAdapterRequest)
        entry = await router_api.adapters.unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{entry.name}' removed successfully.")

    @app.post("/v1/canary_lora_adapter", openapi_extra=_body_schema("CanaryLoraAdapterRequest"))
    async def canary_lora_adapter(request: Request) -> Response:
        """A version that is kept answers a share of the requests; a share of 0 ends the canary."""
        body = await given(request, CanaryLoraAdapterRequest)
        entry = await router_api.adapters.set_canary(body.lora_name, body.version, body.canary_share)
        return json_response(shown_adapter(entry))

    @app.post("/v1/promote_lora_adapter", openapi_extra=_body_schema("PromoteLoraAdapterRequest"))
    async def promote_lora_adapter(request: Request) -> Response:
        """The canary answers all requests."""
        body = await given(request, PromoteLoraAdapterRequest)
        return json_response(shown_adapter(await router_api.adapters.promote(body.lora_name)))

    @app.post("/v1/rollback_lora_adapter", openapi_extra=_body_schema("RollbackLoraAdapterRequest"))
    async def rollback_lora_adapter(request: Request) -> Response:
        """Ends the canary; without one, returns to the version before, or to the one that is named."""
        body = await given(request, RollbackLoraAdapterRequest)
        return json_response(shown_adapter(await router_api.adapters.roll_back(body.lora_name, body.version)))

    @app.get("/v1/lora_adapters")
    async def lora_adapters() -> Response:
        """The adapters that the key may use, with their versions."""
        entries = router_api.adapters.entries(current_caller.get().tenant)
        return json_response({"object": "list", "data": [shown_adapter(entry) for entry in entries]})


def _add_sessions(app: FastAPI, router_api: RouterApi) -> None:
    @app.delete("/v1/sessions/{session_id:text}")
    async def close_session(session_id: str) -> Response:
        """Ends the session's claims on cached KV, at all workers."""
        closed = await router_api.close_session(session_id, current_caller.get().tenant)
        return json_response(
            {
                "id": session_id,
                "object": "session",
                "closed": not closed.unreached,
                "freed_tokens": closed.freed_tokens,
                "unreached": list(closed.unreached),
            }
        )


def _add_operations(app: FastAPI, router_api: RouterApi, metrics: Metrics, siblings: Siblings | None) -> None:
    @app.get("/health")
    @app.get("/live")
    async def live() -> Response:
        """The process answers; /ready says whether it can serve."""
        return json_response({"status": "alive"})

    @app.get("/ready")
    async def ready() -> Response:
        is_ready, reasons = router_api.ready(names_adapters=current_caller.get().sees_operations)
        status = 200 if is_ready else 503
        return json_response({"ready": is_ready, "reasons": reasons}, status, retry_headers(status, None))

    @app.get("/metrics")
    async def show_metrics() -> Response:
        body, caller = metrics.expose(), current_caller.get()
        if siblings is not None:
            body = await siblings.exposition(body)

        def shows(name: str) -> bool:
            return caller.known and router_api.adapters.may_use(caller.tenant, name)

        return Response(seen_exposition(body, shows), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def show_version() -> Response:
        return json_response({"version": package_version()})


def _add_headers(request: Request, call: ParsedRequest) -> None:
    """Add the request's headers and the caller's tenant."""
    spec, headers = call.spec, request.headers
    spec.request_id = spec.request_id or _label(request)
    spec.idempotency_key = headers.get(IDEMPOTENCY_HEADER, "")
    if (resume_id := headers.get(RESUME_HEADER)) is not None:
        if spec.resume_id not in (None, resume_id):
            raise InvalidRequestError(f"resume_after and {RESUME_HEADER} differ", param="resume_after")
        spec.resume_id = resume_id
    if spec.resume_id is not None:
        call.renamed = {**call.renamed, "resume_id": "resume_after" if resume_id is None else RESUME_HEADER}
    if call.more and spec.resume_id is not None:
        raise InvalidRequestError("resume_after: an answer to several prompts cannot go on", param="resume_after")
    spec.explain = headers.get(EXPLAIN_HEADER, "0").lower() in ("1", "true")
    spec.tenant = current_caller.get().tenant
    spec.traceparent = headers.get(TRACEPARENT, "")
    if (access := current_access.get()) is not None:
        access.asked(spec)
    # An idempotency key covers the whole request: the first prompt's request holds it.
    for one in call.more:
        one.request_id, one.tenant, one.traceparent = spec.request_id, spec.tenant, spec.traceparent


def _label(request: Request) -> str:
    """The caller's request id. The request_id of a body is checked by the frontend. Raises: InvalidRequestError."""
    label = request.headers.get(LABEL_HEADER, "")
    if len(label) > MAX_LABEL_BYTES or not label.isascii() or (label and not label.isprintable()):
        rule = f"must be printable ASCII of at most {MAX_LABEL_BYTES} bytes"
        raise InvalidRequestError(f"{LABEL_HEADER} {rule}", param=LABEL_HEADER)
    return label


def _body_schema(model: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{model}"}}}
    return {"requestBody": {"required": True, "content": content}}


def _openapi(app: FastAPI) -> dict[str, Any]:
    """The routes read their bodies themselves (to check size, encoding and numbers); add the models' schemas."""
    if app.openapi_schema is None:
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        _, definitions = models_json_schema(
            [(model, "validation") for model in _BODIES],
            ref_template="#/components/schemas/{model}",
        )
        schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        app.openapi_schema = schema
    return app.openapi_schema
