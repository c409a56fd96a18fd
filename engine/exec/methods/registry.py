"""Name -> method. A new method is one file beside this one and one line here."""

from __future__ import annotations

from diptych.engine.exec.methods.base import LinearMethod
from diptych.engine.exec.methods.plain import PlainMethod

METHODS: dict[str, LinearMethod] = {method.name: method for method in (PlainMethod(),)}
