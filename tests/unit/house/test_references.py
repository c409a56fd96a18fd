"""Files of this repository that comments, docstrings, settings and pages refer to are there."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = re.compile(r"(?<![\w./*<>{}$-])(?:[\w.-]+/)*[\w-]+\.(?:py|md|c|h|proto|toml|sh)(?![\w*/({])")
ELSEWHERE = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "adapter_config.json"} | {
    "manifest.json", "router.toml", "worker.toml", "config.toml", "sitecustomize.py", "keys.json", "settings.toml",
}  # fmt: skip
"""Names of files of models, of users and of Python."""
OF_OTHERS = (
    "kernels/native/xxhash/",
    "rpc/v1/",
    "proto/diptych/rpc/v1/status.proto",
    "bench/results/",
    "tests/golden/",
)
HISTORY = ("docs/faults-fixed.md",)
"""Its symptoms name files as they were; the tests that it names are checked in test_faults_page.py."""


def files_of_the_repository() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    return [file for file in listing.stdout.splitlines() if (ROOT / file).is_file()]


def comments_and_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text)"""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def prose(files: list[str]) -> list[str]:
    kinds = (".py", ".md", ".toml", ".c", ".h", ".proto", "Makefile", "compose.yaml")
    return [file for file in files if file.endswith(kinds) and not file.startswith(OF_OTHERS) and file not in HISTORY]


def endings(files: list[str]) -> set[str]:
    """Every path, and every end of one: a reference needs no more than tells it apart."""
    return {"/".join(parts[i:]) for file in files for parts in [file.split("/")] for i in range(len(parts))}


def unknown(text: str, file: str, known: set[str]) -> list[str]:
    """References in a text of `file` to what is not there: by an end of its path, or from the folder of `file`."""
    found = []
    for reference in REFERENCE.findall(text):
        wanted = reference.removeprefix("./").removeprefix("src/").removeprefix("diptych/")
        if wanted not in known and wanted not in ELSEWHERE and not (ROOT / file).parent.joinpath(reference).exists():
            found.append(reference)
    return found


def wrong(file: str, source: str, known: set[str]) -> Iterator[str]:
    """ "file:line: reference" of what is referred to and not there. Of Python only comments and docstrings are looked at."""
    if not unknown(source, file, known):  # most files: nothing to parse
        return
    for line, text in comments_and_docstrings(source) if file.endswith(".py") else [(1, source)]:
        yield from (f"{file}:{line}: {one}" for one in unknown(text, file, known))


def test_15_6_3_every_file_that_is_referred_to_is_there() -> None:
    files = files_of_the_repository()
    sources = {file: (ROOT / file).read_text(encoding="utf-8") for file in prose(files)}
    assert sum(len(REFERENCE.findall(source)) for source in sources.values()) > 1000, "the search finds nothing"
    known = endings(files)
    assert not [one for file, source in sources.items() for one in wrong(file, source, known)]


FILES = ["common/text/revision.py", "docs/decisions/one.md", "kvtransfer/gpu/ring.py"]


@pytest.mark.parametrize(
    "text", ["see common/revision.py", "(gpu_ring.py)", "[page](decisions/none.md)", "as in STYLE.md"]
)
def test_what_is_not_there_is_found(text: str) -> None:
    assert unknown(text, "docs/page.md", endings(FILES))


@pytest.mark.parametrize("text", ["common/text/revision.py", "text/revision.py, ring.py", "*.py"])
def test_what_is_there_is_not(text: str) -> None:
    assert unknown(text, "docs/page.md", endings(FILES)) == []
