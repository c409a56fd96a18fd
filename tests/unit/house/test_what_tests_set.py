"""docs/testing.md lists every variable and flag that tests set and no user would; compared with the tests' source both
ways."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from diptych.worker.config import WorkerConfig

ROOT = Path(__file__).resolve().parents[3]
OS_ENVIRON = ast.dump(ast.parse("os.environ", mode="eval").body)
VARIABLE = re.compile(r"(?!PATH$|HOME$)[A-Z][A-Z0-9_]{3,}")


def names_of_environments(tree: ast.AST) -> Iterator[str]:
    """Constant keys of what is set: setenv(KEY), environ[KEY] = ..., and dicts that become an environment or a part of one."""

    def keys(node: ast.expr) -> Iterator[str]:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Dict):
                for key in inner.keys:
                    if isinstance(key, ast.Constant) and isinstance(key.value, str) and VARIABLE.fullmatch(key.value):
                        yield key.value

    def is_environment(name: str) -> bool:
        return re.search(r"(^|_)env(ironment)?(_|$)", name.lower()) is not None

    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr == "setenv":
                first = node.args[0]
                if isinstance(first, ast.Constant):
                    yield str(first.value)
            for keyword in node.keywords:
                if keyword.arg in ("env", "extra_env"):
                    yield from keys(keyword.value)
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and ast.dump(target.value) == OS_ENVIRON:
                    if isinstance(target.slice, ast.Constant):
                        yield str(target.slice.value)
                elif isinstance(target, ast.Name | ast.Attribute):
                    name = target.id if isinstance(target, ast.Name) else target.attr
                    if is_environment(name):
                        yield from keys(node.value)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name) and is_environment(node.target.id):
                yield from keys(node.value)
        elif isinstance(node, ast.BinOp):
            if isinstance(node.op, ast.BitOr) and any(
                isinstance(inner, ast.Attribute | ast.Name) and "environ" in ast.unparse(inner)
                for inner in ast.walk(node)
            ):
                yield from keys(node)
        elif isinstance(node, ast.Return) and node.value is not None and "env |" in ast.unparse(node.value):
            yield from keys(node.value)


def section() -> str:
    text = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
    return text.partition("## Variables that tests set")[2].partition("\n## ")[0]


def reported() -> str:
    """The table's first columns."""
    return "\n".join(line.split("|")[1] for line in section().splitlines() if line.startswith("|"))


def test_the_table_names_the_variables_that_tests_set() -> None:
    found = {
        name
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for text in [path.read_text(encoding="utf-8")]
        if "env" in text.lower()  # in the name of everything that is looked for
        for name in names_of_environments(ast.parse(text))
    }
    assert {"DIPTYCH_RUN_DIR", "OMP_NUM_THREADS", "OTEL_EXPORTER_OTLP_ENDPOINT"} <= found, "the search finds nothing"
    assert found == set(re.findall(r"`([A-Z0-9_]+)`", reported()))


def test_the_table_names_the_flags_that_are_for_tests() -> None:
    described = inspect.getdoc(WorkerConfig) or ""
    of_tests = set(re.findall(r"^ +(\w+): [^\n]*\btests\b(?!\))", described, re.MULTILINE))
    assert "fault_corrupt_every" in of_tests
    on = {field.name for field in fields(WorkerConfig) if field.default is True}
    flags = {("--no-" if name in on else "--") + name.replace("_", "-") for name in of_tests}
    assert flags == set(re.findall(r"`(--[a-z-]+)`", reported()))


def test_a_cluster_under_test_gets_nothing_of_the_tests_own() -> None:
    """The environment that clusters.py passes to it: see `environment` there."""
    source = (ROOT / "tests" / "support" / "diptych_tests" / "clusters.py").read_text(encoding="utf-8")
    assert set(names_of_environments(ast.parse(source))) == {"DIPTYCH_RUN_DIR"}
