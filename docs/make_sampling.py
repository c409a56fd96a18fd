"""Write the SDK's keywords in client/sampling_options.py and the table in docs/api.md from the table of sampling
parameters (SAMPLING in common/sampling.py).

    python docs/make_sampling.py [--check]        --check: exit with 1 if a file differs from the table
"""

from __future__ import annotations

import re
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
    "float": "number", "int": "integer", "bool": "true, false", "bool | str": 'true, false, "never"',
    "Sequence[int]": "list of integers", "Sequence[str]": "list of strings", "str | Sequence[str]": "string or list",
    "Mapping[int, float]": "object",
}  # fmt: skip
MODULE = '''"""Sampling keywords of the SDK, written by docs/make_sampling.py: change SAMPLING in common/sampling.py instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict


class SamplingOptions(TypedDict, total=False):
    """Sampling options. All keywords are optional; None means not given.

    Args:
'''


def facts(name: str, row: Row) -> tuple[str, str]:
    """(effect, default)."""
    most = f"; at most {row.at_most}" if row.at_most and "at most" not in row.text else ""
    since = f"; since {row.since}" if row.since != FIRST_VERSION else ""
    value = DEFAULTS[name].value if isinstance(DEFAULTS[name], Enum) else DEFAULTS[name]
    plain = "none" if value in (None, ()) else f"{value:g}" if isinstance(value, float) else str(value).lower()
    return f"{row.text}{most}{since}", row.default_text or plain


def options_module() -> str:
    lines: list[str] = []
    for name, row in ROWS.items():
        entry = "{}: {}. Default: {}.".format(name, *facts(name, row))
        lines += textwrap.wrap(entry, 116, initial_indent=" " * 8, subsequent_indent=" " * 12, break_on_hyphens=False)
    lines += ['    """', "", *(f"    {name}: {row.check.type_name} | None" for name, row in ROWS.items())]
    return MODULE + "\n".join(lines) + "\n"


def table() -> Iterator[str]:
    yield "| | field | type | default | |\n|---|---|---|---|---|\n"
    for group in dict.fromkeys(row.group for row in ROWS.values()):
        shown = group
        for name, row in ((name, row) for name, row in ROWS.items() if row.group == group):
            text, default = facts(name, row)
            yield f"| {shown} | `{name}` | {JSON_TYPES[row.check.type_name]} | {default} | {text} |\n"
            shown = ""


def main() -> int:
    page = re.sub(f"{BEGIN}.*{END}", lambda _: BEGIN + "".join(table()) + END, PAGE.read_text("utf-8"), flags=re.DOTALL)
    written = {OPTIONS: options_module(), PAGE: page}
    changed = [path for path, text in written.items() if not path.exists() or path.read_text("utf-8") != text]
    for path in changed:
        if "--check" in sys.argv[1:]:
            print(f"{path.relative_to(ROOT)} is not what the table says: make sdk-reference", file=sys.stderr)
        else:
            path.write_text(written[path], "utf-8")
    return 1 if changed and "--check" in sys.argv[1:] else 0


if __name__ == "__main__":
    sys.exit(main())
