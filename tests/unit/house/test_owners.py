"""Each collection of the engine has one owner: no other module reads a private attribute or changes what an owner shows."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[3] / "engine"
VIEWS = {
    "requests": "lifecycle.py",
    "deferred_free": "lifecycle.py",
    "prefilling": "running.py",
    "decoding": "running.py",
    "paused": "running.py",
    "members": "choices.py beams.py",
    "passed": "passing.py",
}
"""What owners show of their collections, and the files that may change it."""
CHANGES = {
    "add", "append", "clear", "discard", "extend", "insert", "move_to_end", "pop", "popitem", "popleft", "remove",
    "setdefault", "sort", "update",
}  # fmt: skip


def _view(node: ast.expr) -> str | None:
    if not isinstance(node, ast.Attribute) or node.attr not in VIEWS:
        return None
    return None if ast.unparse(node) == "out.requests" else node.attr  # the step's own list


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def breaches(source: str, file: str) -> Iterator[str]:
    nodes = list(ast.walk(ast.parse(source)))
    # Another object of a class in the same file, as in a linked list, is not another owner.
    own = {node.attr for node in nodes if isinstance(node, ast.Attribute) and _is_self(node.value)}
    for node in nodes:
        changed: list[ast.expr] = []
        match node:
            case ast.Attribute(value=value, attr=attr) if attr.startswith("_") and not attr.endswith("__"):
                if not _is_self(value) and attr not in own:
                    yield f"{file}:{node.lineno}: private {attr} of {ast.unparse(value)}"
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in CHANGES:
                changed = [value]
            case ast.Assign(targets=targets) | ast.Delete(targets=targets):
                changed = [t.value if isinstance(t, ast.Subscript) else t for t in targets]
            case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
                changed = [target.value if isinstance(target, ast.Subscript) else target]
        for one in changed:
            view = _view(one)
            if view is not None and file not in VIEWS[view].split():
                yield f"{file}:{node.lineno}: {ast.unparse(one)} is changed outside of {VIEWS[view]}"


@pytest.mark.parametrize(
    "line",
    [
        "live.running.decoding[attempt] = request",
        "del live.running.decoding[attempt]",
        "live.running.paused.pop(attempt)",
        "group.members.clear()",
        "scheduler.requests |= more",
        "scheduler.requests = {}",
        "live.running._decoding",
        "outbox._events.append(event)",
    ],
)
def test_a_change_from_outside_is_found(line: str) -> None:
    assert list(breaches(line, "elsewhere.py"))


def test_reading_a_view_is_allowed() -> None:
    assert not list(
        breaches("x = live.running.decoding[attempt]\nself._decoding[x] = len(group.members)", "elsewhere.py")
    )


PROBES = {"isinstance", "hasattr", "getattr", "callable"}


def probes(source: str, file: str) -> Iterator[str]:
    """Calls that find out what a runner or an executor is, in place of its declared capabilities."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Name(id=name), args=[probed, *_]) if name in PROBES:
                if any(word in ast.unparse(probed) for word in ("runner", "executor")):
                    yield f"{file}:{node.lineno}: {ast.unparse(node)}"


def test_no_runner_is_probed() -> None:
    """A runner declares what it can do: RunnerCapabilities."""
    assert list(probes("if isinstance(self.model.runner, Async): pass", "elsewhere.py"))
    root = ENGINE.parent
    files = [*ENGINE.glob("*.py"), *(ENGINE / "sched").rglob("*.py")]
    files += [path for room in ("worker", "prefill", "decode") for path in (root / room).glob("*.py")]
    assert not [found for path in files for found in probes(path.read_text(), path.name)]


def test_no_module_changes_what_another_one_owns() -> None:
    files = [*(ENGINE / "sched").rglob("*.py"), *ENGINE.glob("*.py")]
    assert len(files) > 30
    assert not [found for path in files for found in breaches(path.read_text(), path.name)]
