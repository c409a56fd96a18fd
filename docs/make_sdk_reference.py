"""Write docs/sdk.md, the reference of the gRPC SDK, from the docstrings of the exports of `diptych.client`.

python docs/make_sdk_reference.py [--check]        --check: exit with 1 if the page differs from the docstrings
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc

import diptych.client as sdk
from diptych.client import DiptychError

CODES = {code.value[0]: code.name for code in grpc.StatusCode}
MADE_BY_A_CLIENT = ("Stream", "AsyncStream")
PAGE = Path(__file__).with_name("sdk.md")
HEAD = """# The gRPC SDK

Written by `docs/make_sdk_reference.py` from the docstrings of `diptych.client`; change those, not this page.
Programs to start from are in [examples](../examples/README.md).

"""


def doc(value: Any) -> list[str]:
    """A docstring as Markdown: each entry of `Args:` and similar sections is an item of a list."""
    lines = inspect.cleandoc(getattr(value, "__doc__", None) or "").splitlines()
    found: list[str] = []
    section = False
    for line in lines:
        if line.strip() in ("Args:", "Attributes:"):
            section = True
            found += ["", f"**{line.strip()[:-1]}**", ""]
        elif line.startswith(("Raises:", "Returns:")):
            section = False
            name, _, text = line.partition(":")
            found += ["", f"**{name}:** {text.strip()}"]
        elif section and line.startswith("    ") and not line.startswith("     "):
            name, colon, text = line.strip().partition(": ")
            found.append(f"- `{name}`: {text}" if colon else f"  {name}")
        elif section and line.startswith("     "):
            found.append(f"  {line.strip()}")
        else:
            section = section and line.startswith(" ")
            found.append(line)
    return found


def signature(value: Any) -> str:
    try:
        text = str(inspect.signature(value))
    except (TypeError, ValueError):
        return "()"
    return text.replace("(self, ", "(").replace("(self)", "()").replace("'", "")


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties, in the order of the source, including those of base classes of this project."""
    seen: set[str] = set()
    for owner in cls.__mro__:
        if not owner.__module__.startswith("diptych."):
            continue
        for name, value in vars(owner).items():
            public = not name.startswith("_") or name in ("__iter__", "__aiter__")
            if public and name not in seen and (inspect.isfunction(value) or isinstance(value, property)):
                seen.add(name)
                yield name, value


def class_part(name: str, cls: type) -> Iterator[str]:
    yield from (f"## `{name}`", "")
    if name not in MADE_BY_A_CLIENT and not issubclass(cls, dict):
        yield from ("```python", f"{name}{signature(cls)}", "```", "")
    yield from (*doc(cls), "")
    for member, value in members(cls):
        if dataclasses.is_dataclass(cls) and member.startswith("from_"):
            continue  # built from protobuf messages, which callers never see
        if isinstance(value, property):
            yield from (f"### `{name}.{member}`", "", *doc(value.fget), "")
        else:
            yield from (f"### `{name}.{member}{signature(value)}`", "", *doc(value), "")


def error_rows(errors: list[type[DiptychError]]) -> Iterator[str]:
    yield from (
        "## Errors",
        "",
        "Every failure is a `DiptychError`. Catch the class that your program can handle.",
        "",
    )
    yield from ("| class | below | gRPC code | HTTP status | may be tried again | when |", "|---|---|---|---|---|---|")
    for error in errors:
        when = (inspect.cleandoc(error.__doc__ or "").splitlines() or [""])[0]
        again = "yes" if error.retryable else "no"
        code, status = CODES[error.grpc_code], error.http_status
        yield f"| `{error.__name__}` | `{error.__base__.__name__}` | {code} | {status} | {again} | {when} |"  # type: ignore[union-attr]


def page() -> str:
    exported = [(name, getattr(sdk, name)) for name in sdk.__all__]
    classes = [(name, value) for name, value in exported if isinstance(value, type)]
    errors = [value for _, value in classes if issubclass(value, DiptychError)]
    first = ["Client", "Stream", "AsyncClient", "AsyncStream", "GenerateOptions", "SamplingOptions"]
    others = sorted(
        (pair for pair in classes if not issubclass(pair[1], DiptychError)),
        key=lambda pair: (first.index(pair[0]) if pair[0] in first else len(first), pair[0]),
    )
    lines = [HEAD, "", *doc(sdk), ""]
    for name, value in others:
        lines += class_part(name, value)
    lines += error_rows(sorted(errors, key=lambda error: error.__name__))
    lines += ["", "## Constants", ""]
    lines += [f"- `{name}` = `{value!r}`" for name, value in exported if isinstance(value, (str, int, float))]
    text = "\n".join(line.rstrip() for line in lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.rstrip() + "\n"


def main() -> int:
    written = page()
    if "--check" in sys.argv[1:]:
        if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != written:
            print("docs/sdk.md is not what the docstrings say: make sdk-reference", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(written, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
