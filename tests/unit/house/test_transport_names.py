"""Item: `TransportSpec` registry. No code decides by the name of a transport: its spec says what is needed of it."""

from __future__ import annotations

import ast
from pathlib import Path

from diptych.kvtransfer.fabric.registry import names

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("cli", "worker", "decode", "prefill", "kvtransfer")
NAMES = set(names()) - {"auto"}


def compared(tree: ast.AST) -> list[int]:
    """Lines where something is compared with, looked up by, or matched against the name of a transport."""
    found = []
    for node in ast.walk(tree):
        parts: list[ast.AST] = []
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.MatchValue):
            parts = [node.value]
        elif isinstance(node, ast.Subscript):
            parts = [node.slice]
        constants = (inner for part in parts for inner in ast.walk(part) if isinstance(inner, ast.Constant))
        found += [constant.lineno for constant in constants if constant.value in NAMES]
    return found


def test_the_rule_finds_what_it_forbids() -> None:
    for source in ('x == "ucx"', 'x in ("ipc", "y")', 'table["nixl"]', 'match x:\n case "inproc":\n  pass'):
        assert compared(ast.parse(source)), source


def test_no_code_decides_by_the_name_of_a_transport() -> None:
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            found += [f"{path.relative_to(ROOT)}:{line}" for line in compared(ast.parse(path.read_text()))]
    assert not found
