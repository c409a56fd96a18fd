"""Triton's interpreter without work that it does again for every call, type and tensor: the same operations on the same
numbers, in less than half the time.

`install` replaces these parts of the interpreter of Triton 3.6 (test_quick_interpreter.py compares what it computes):

- `_patch_lang` looks through all of `triton.language` at every call of a jitted function, also inside a kernel. What it
  changes is noted once, and changed from the note.
- Sums, differences and products of integers are computed in 64 bits too, for an assertion that only the option `debug` makes.
- Every tensor and every type of blocks describes its shape in objects of their own. Equal shapes share them.
- The type of a tuple is described when it is asked for.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

Part = tuple[Any, str, Any]
"""Owner, attribute and value."""

VERSION = "3.6."
"""Of the Triton that has these parts. Another one keeps its own."""


class _Patches:
    """Replaces `_patch_lang`, and is the scope that it returns to a kernel: `restore` takes the changes back.

    Functions inside a kernel find the changes made. Triton's own see `triton.language.core` instead: changes there stay, as
    in the original."""

    def __init__(self, interpreter, tl) -> None:
        self._original, self._missing = interpreter._patch_lang, interpreter._MISSING
        self._core = tl.core
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self._made, self._core_made = False, False

    def __call__(self, fn):
        if not self._made:
            self._make(fn)
            return self
        if not self._core_made and any(value is self._core for value in fn.__globals__.values()):
            self._original(fn)
            self._core_made = True
        return None  # of a call inside a kernel: nothing takes it back

    def _make(self, fn) -> None:
        if not self._changes:
            before: dict[tuple[int, str], tuple[Any, Any]] = {}
            for owner, name, value in self._original(fn)._changes:
                before.setdefault((id(owner), name), (owner, value))
            self._changes = [(owner, name, vars(owner)[name], value) for (_, name), (owner, value) in before.items()]
        else:
            for owner, name, value, _ in self._changes:
                setattr(owner, name, value)
        self._made = True

    def restore(self) -> None:
        self._made = False
        for owner, name, _, value in self._changes:
            if value is self._missing:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def _shapes(core) -> Iterator[Part]:
    """Of tuple, block_type and tensor."""
    block_init, constexpr, shapes, types = core.block_type.__init__, core.constexpr, {}, {}
    no_shape = (constexpr(1), core.tuple([]))

    def tuple_init(self, args, type=None):
        self.values = list(args)
        if type is not None:
            self.type = type if isinstance(type, core.tuple_type) else core.tuple_type(type)

    def tuple_getattr(self, name):
        if name == "type":
            self.type = core._type_for_tuple_values(self.values)
            return self.type
        return self.values[self.type.fields.index(name)]

    def block_type_init(self, element_ty, shape):
        lengths = shape.values if isinstance(shape, core.tuple) else shape
        key = str(element_ty), *(getattr(n, "value", n) for n in lengths)
        if key not in types:
            block_init(self, element_ty, shape)
            types[key] = self.shape, self.numel, self.name
            return
        self.element_ty = element_ty
        self.shape, self.numel, self.name = types[key]

    def tensor_init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        if not type.is_block():
            self.numel, self.shape = no_shape
            return
        key = tuple(type.shape.values)
        if key not in shapes:
            shapes[key] = constexpr(type.numel), core.tuple([constexpr(n) for n in key])
        self.numel, self.shape = shapes[key]

    yield core.tuple, "__init__", tuple_init
    yield core.tuple, "__getattr__", tuple_getattr
    yield core.block_type, "__init__", block_type_init
    yield core.tensor, "__init__", tensor_init


def _dtypes(interpreter) -> Iterator[Part]:
    """The original makes a table of all types to look one up."""
    original, known = interpreter._get_np_dtype, {}

    def np_dtype(dtype):
        if dtype.name not in known:
            known[dtype.name] = original(dtype)
        return known[dtype.name]

    yield interpreter, "_get_np_dtype", np_dtype


def _parts() -> Iterator[Part]:
    import triton.language as tl
    from triton.runtime import interpreter

    yield interpreter, "_patch_lang", _Patches(interpreter, tl)
    builder = interpreter.interpreter_builder
    yield builder, "options", replace(builder.options, sanitize_overflow=False)
    yield from _shapes(tl.core)
    yield from _dtypes(interpreter)


_before: list[Part] = []


def install() -> None:
    """In this process, where Triton is interpreted, in the version that this is for."""
    if _before or importlib.util.find_spec("triton") is None:
        return
    import triton

    if triton.knobs.runtime.interpret and triton.__version__.startswith(VERSION):
        for owner, name, value in list(_parts()):
            _before.append((owner, name, vars(owner)[name]))
            setattr(owner, name, value)


@contextmanager
def as_shipped() -> Iterator[None]:
    """The interpreter as it is without `install`, for the test that compares the two."""
    replaced = [(owner, name, vars(owner)[name]) for owner, name, _ in _before]
    for owner, name, value in _before:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)
