"""Between messages and dataclasses whose fields have the same names."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def same_fields(kind: type, source: object, *, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values that `source`, a message or a dataclass, has for the fields of the dataclass `kind`, except `but`."""
    return {field.name: getattr(source, field.name) for field in fields(kind) if field.name not in but}
