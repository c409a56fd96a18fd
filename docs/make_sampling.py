"""Write what stands in several places from the one table of sampling parameters (SAMPLING in common/sampling.py): the SDK's
keywords in client/sampling_options.py, and the table in docs/api.md.

python docs/make_sampling.py [--check]        --check: exit with 1 where a file is not what the table says
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from diptych.common.sampling import DEFAULTS, SAMPLING
from diptych.common.sampling_table import FIRST_VERSION, Row

ROOT = Path(__file__).resolve().parent.parent
OPTIONS = ROOT / "src" / "diptych" / "client" / "sampling_options.py"
PAGE = ROOT / "docs" / "api.md"
BEGIN, END = "<!-- written by docs/make_sampling.py -->\n", "<!-- end of what docs/make_sampling.py writes -->\n"
ROWS = {name: row for name, row in SAMPLING.items() if row.check.type_name != "Grammar"}
JSON_TYPES = {
    "float": "number", "int": "integer", "bool": "true, false",
    "Sequence[int]": "list of integers", "Sequence[str]": "list of strings", "str | Sequence[str]": "string or list",
    "Mapping[int, float]": "object", "bool | str": 'true, false, "never"',
}  # fmt: skip
"""By type of the SDK."""


def default(name: str, row: Row) -> str:
    value = DEFAULTS[name]
    if isinstance(value, Enum):
        value = value.value
    plain = (
        "none"
        if value in (None, ())
        else str(value).lower()
        if isinstance(value, bool)
        else f"{value:g}"
        if isinstance(value, float)
        else f"{value}"
    )
    return row.default_text or plain


def text(row: Row) -> str:
    most = f"; at most {row.at_most}" if row.at_most and "at most" not in row.text else ""
    since = f"; since {row.since}" if row.since != FIRST_VERSION else ""
    return f"{row.text}{most}{since}"


def options_module() -> str:
    lines = [
        '"""Sampling keywords of the SDK, written by docs/make_sampling.py: change SAMPLING in common/sampling.py instead."""',
        *("", "from __future__ import annotations", ""),
        *("from collections.abc import Mapping, Sequence", "from typing import TypedDict", "", ""),
        "class SamplingOptions(TypedDict, total=False):",
        '    """How the tokens are drawn, and where the answer ends. All keywords are optional; None is not given.',
        *("", "    Args:"),
    ]
    for name, row in ROWS.items():
        entry = f"{name}: {text(row)}. Default: {default(name, row)}."
        lines += textwrap.wrap(entry, 116, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    lines += ['    """', ""]
    lines += [f"    {name}: {row.check.type_name} | None" for name, row in ROWS.items()]
    return "\n".join(lines) + "\n"


def table() -> Iterator[str]:
    yield from ("| | field | type | default | |", "|---|---|---|---|---|")
    groups = dict.fromkeys(row.group for row in ROWS.values())
    for group in groups:
        shown = group
        for name, row in ROWS.items():
            if row.group == group:
                type_name = JSON_TYPES[row.check.type_name]
                yield f"| {shown} | `{name}` | {type_name} | {default(name, row)} | {text(row)} |"
                shown = ""


def page_with_table(page: str) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(table()) + "\n" + END + after


def main() -> int:
    written = {OPTIONS: options_module(), PAGE: page_with_table(PAGE.read_text(encoding="utf-8"))}
    changed = [path for path, text in written.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in changed:
            print(f"{path.relative_to(ROOT)} is not what the table says: make sdk-reference", file=sys.stderr)
        return 1 if changed else 0
    for path in changed:
        path.write_text(written[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
