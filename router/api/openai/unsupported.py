"""Error messages for routes that do not exist. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable

NOT_HAD = {
    "assistants": "assistants", "audio": "speech and transcription", "batches": "batches", "chatkit": "ChatKit",
    "classify": "classification", "containers": "containers", "conversations": "stored conversations",
    "edits": "edits", "embeddings": "embeddings", "engines": "engines", "evals": "evals", "files": "files",
    "fine-tunes": "fine-tuning", "fine_tuning": "fine-tuning", "graders": "graders", "images": "images",
    "messages": "Anthropic messages", "moderations": "moderations", "organization": "administration",
    "pooling": "pooling", "projects": "administration", "realtime": "realtime sessions", "rerank": "reranking",
    "score": "scores", "skills": "skills", "threads": "threads", "uploads": "uploads",
    "vector_stores": "vector stores", "videos": "videos", "webhooks": "webhooks",
}  # fmt: skip
"""First part of the path after /v1 -> its meaning: routes of the OpenAI API and similar servers."""
_STORED = {"chat/completions": "chat completions", "responses": "responses"}


def no_route_message(method: str, path: str, known: Collection[str]) -> str:
    """Why there is no such route, and a similar existing one. Args: known: existing paths."""
    bare = "/" + "/".join(part for part in path.split("/") if part and part != "v1")
    meant = next((one for one in (f"/v1{bare}", bare) if one in known and one != path), None)
    shown = f"{method} {path[:128]}"
    if meant is not None:
        return f"there is no {shown}; did you mean {meant}?"
    for prefix, name in _STORED.items():
        if path.startswith(f"/v1/{prefix}/"):
            return f"there is no {shown}: no {name} are stored here"
    first = bare.split("/")[1]
    if first in NOT_HAD:
        return f"there is no {shown}: this server generates text and has no {NOT_HAD[first]}"
    return f"there is no {shown}; GET / lists the routes"


def not_allowed(method: str, path: str, allowed: Iterable[str]) -> str:
    return f"{path[:128]} takes {' and '.join(allowed)}, not {method}"
