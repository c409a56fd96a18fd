"""Item: `common/kv_format.py` is the only place with dtypes and their bytes. A second table is refused."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from diptych.common.kv_format import DTYPES

ROOT = Path(__file__).resolve().parents[3]
ROOMS = ("common", "engine", "kvtransfer", "worker", "decode", "prefill", "router", "rpc", "cli")
THE_TABLE = ROOT / "common" / "kv_format.py"
SIZES = {"element_size", "itemsize"}
MAY_ASK_SIZES = {
    "engine/exec/cuda/decoder.py",  # tile sizes of a kernel, by the element
    "common/block_identity.py",  # of token ids
}


def tables(tree: ast.AST) -> list[int]:
    """Lines with two dtypes side by side in a literal, or with a number that is chosen by the name of a dtype."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict | ast.Tuple | ast.List | ast.Set):
            parts = [*node.keys, *node.values] if isinstance(node, ast.Dict) else node.elts
            names = {part.value for part in parts if isinstance(part, ast.Constant)} & DTYPES.keys()
            if len(names) > 1:
                found.append(node.lineno)
        if isinstance(node, ast.IfExp) and any(
            isinstance(n, ast.Constant) and n.value in DTYPES for n in ast.walk(node.test)
        ):
            ends = [node.body, node.orelse]
            if all(isinstance(end, ast.Constant) and isinstance(end.value, int) for end in ends):
                found.append(node.lineno)
    return found


def sizes_asked(tree: ast.AST) -> list[int]:
    return [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr in SIZES]


@pytest.mark.parametrize(
    "source",
    [
        'X = {"float32": 4, "bfloat16": 2}',
        'X = ("float32", "float16")',
        'x = 4 if dtype == "float32" else 2',
        'y = {torch.float32: "float32", torch.float16: "float16"}',
    ],
)
def test_the_rule_finds_what_it_forbids(source: str) -> None:
    assert tables(ast.parse(source))
    assert sizes_asked(ast.parse("n * tensor.element_size()"))
    assert sizes_asked(ast.parse("n * dtype.itemsize"))


def test_no_second_table() -> None:
    found = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if path == THE_TABLE or "rpc/v1" in str(path):
                continue
            name, tree = str(path.relative_to(ROOT)), ast.parse(path.read_text())
            found += [f"{name}:{line}" for line in tables(tree)]
            found += [f"{name}:{line}" for line in sizes_asked(tree) if name not in MAY_ASK_SIZES]
    assert not found
