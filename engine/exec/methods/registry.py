"""Name -> method. A new method is one file beside this one and one line here."""

from __future__ import annotations

from diptych.engine.exec.methods.base import LinearMethod
from diptych.engine.exec.methods.fp8 import Fp8Method
from diptych.engine.exec.methods.gguf import GgufMethod
from diptych.engine.exec.methods.int4 import Int4Method
from diptych.engine.exec.methods.int8 import Int8Method
from diptych.engine.exec.methods.plain import PlainMethod

METHODS: dict[str, LinearMethod] = {
    method.name: method for method in (PlainMethod(), Int8Method(), Fp8Method(), Int4Method(), GgufMethod())
}
