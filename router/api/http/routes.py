"""The index page of the HTTP server."""

from __future__ import annotations

import html

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from diptych.router.api.openai.errors import json_response

_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
}
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Diptych</title>
<style>body{font:1rem/1.5 system-ui,sans-serif;margin:2rem auto;max-width:50rem;padding:0 1rem}td{padding:0 1.5rem 0 0}</style>
<h1>Diptych %s</h1><p>An OpenAI-compatible server. Clients take this address with <code>/v1</code> as their base URL;
<a href="/openapi.json">openapi.json</a> describes the bodies, <a href="/status">/status</a> shows the cluster.</p>
<table>%s</table></html>
"""


def add_index(app: FastAPI, version: str) -> None:
    """`/` and `/docs`: HTML for browsers, JSON otherwise."""

    async def index(request: Request) -> Response:
        rows = routes_of(app)
        if "text/html" in request.headers.get("accept", ""):
            shown = "".join(f"<tr><td>{method}<td><code>{html.escape(path)}</code>" for method, path in rows)
            return Response(_PAGE % (html.escape(version), shown), headers=_HEADERS, media_type="text/html")
        routes = [f"{method} {path}" for method, path in rows]
        return json_response({"name": "diptych", "version": version, "openapi": "/openapi.json", "routes": routes})

    for path in ("/", "/docs"):
        app.get(path, include_in_schema=False)(index)


def routes_of(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of every route for clients, and of the page for readers."""
    routes = [r for r in app.routes if isinstance(r, APIRoute) and (r.include_in_schema or r.path == "/status")]
    return [(method, route.path) for route in routes for method in sorted(route.methods or ())]
