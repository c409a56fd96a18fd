"""The status page: three static files of the package, and one JSON document that they fetch every second.

The files are public and need no key; /status.json does, and the page asks the reader for one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from diptych.router.api.auth.authenticator import current_caller
from diptych.router.api.openai.errors import json_response
from diptych.router.processes.siblings import Siblings

Status = Callable[[str], dict[str, Any]]
"""The status for a tenant."""

_FILES = {
    "/status": ("status.html", "text/html; charset=utf-8"),
    "/status.css": ("status.css", "text/css; charset=utf-8"),
    "/status.js": ("status.js", "text/javascript; charset=utf-8"),
}
STATIC_PATHS = frozenset(_FILES)
_HEADERS = {
    # Nothing from elsewhere and no inline code: the page shows labels of requests, which clients choose.
    "content-security-policy": "default-src 'self'; img-src 'self' data:; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


@cache
def _read(name: str) -> bytes:
    return resources.files("diptych.router.observe").joinpath("static", name).read_bytes()


def add_status(app: FastAPI, status: Status, version: str, siblings: Siblings | None = None) -> None:
    """Add the page's routes to the application. `siblings`: the other processes of this router."""

    def add(path: str, name: str, media_type: str) -> None:
        @app.get(path, include_in_schema=False)
        async def static() -> Response:
            return Response(_read(name), headers=_HEADERS, media_type=media_type)

    for path, (name, media_type) in _FILES.items():
        add(path, name, media_type)

    @app.get("/status.json")
    async def status_json() -> Response:
        """The cluster in this router's view, and its last minutes."""
        tenant = current_caller.get().tenant
        content = status(tenant)
        if siblings is not None:
            content = await siblings.status(content, tenant)
        return json_response(content | {"version": version}, headers={"cache-control": "no-store"})
