"""Triton's interpreter without work that it does again for every call, type and tensor: the same operations on the same
numbers, in less than half the time.

`install` replaces these parts of the interpreter of Triton 3.6 (test_quick_interpreter.py compares what it computes):

- `_patch_lang` looks through all of `triton.language` at every call of a jitted function, also inside a kernel. What it
  changes is noted once, and changed from the note.
- Sums, differences and products of integers are computed in 64 bits too, for an assertion that only the option `debug` makes.
- Every tensor and every type of blocks describes its shape in objects of their own. Equal shapes share them.
- The type of a tuple is described when it is asked for.
- Each call of `triton.language` copies its arguments twice, and each operator is two such calls.
- Operands of one type and shape need no conversion, nor does an integer beside a block of integers or of floats. The original
  looks for one in either, and makes each constant twice.
- Constants, and blocks of one value, are built by way of a description of their type.

One part is replaced for another reason: a product of matrices is BLAS's, whose bits depend on the CPU and on how many rows there
are. Tests of what is the same in any company compare blocks of different heights, so each element is summed in the order of K.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"
from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

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
    block_init, constexpr, types = core.block_type.__init__, core.constexpr, {}
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
        if type(shape) is core.tuple and type(shape.values[0]) is int:  # that of another type
            key = element_ty.name, *shape.values
        else:
            lengths = shape.values if isinstance(shape, core.tuple) else shape
            key = element_ty.name, *(getattr(n, "value", n) for n in lengths)
        if key not in types:
            block_init(self, element_ty, shape)
            of_tensors = constexpr(self.numel), core.tuple([constexpr(n) for n in self.shape.values])
            types[key] = self.shape, self.numel, self.name, of_tensors
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.of_tensors = types[key]

    def tensor_init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.of_tensors if type.is_block() else no_shape

    yield core.tuple, "__init__", tuple_init
    yield core.tuple, "__getattr__", tuple_getattr
    yield core.block_type, "__init__", block_type_init
    yield core.tensor, "__init__", tensor_init


def _calls(interpreter, core) -> Iterator[Part]:
    """The original removes `_semantic` from a copy of the arguments, and `builtin` looks whether it is there."""
    plain = core.builtin(lambda: None).__code__

    def patch_attr(obj, name, member, builder, scope):
        semantic = interpreter.TritonSemantic(builder)
        while getattr(member, "__code__", None) is plain:
            member = member.__wrapped__

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, call)

    as_it_is = {int, float, bool, str, type(None), core.tensor, core.dtype, core.pointer_type, core.block_type}

    def unwrap(value):
        kind = type(value)
        if kind in as_it_is:
            return value
        if kind is core.constexpr:
            return value.value
        return [unwrap(one) for one in value] if kind is list else original(value)

    original = core._unwrap_if_constexpr
    yield interpreter, "_patch_attr", patch_attr
    yield core, "_unwrap_if_constexpr", unwrap


_INT32 = range(-(2**31), 2**31)


def _operands(interpreter, core) -> Iterator[Part]:
    """Of binary operators: what needs no conversion is told at once. Everything else, and each error, is the original's."""
    semantic, tensor = interpreter.TritonSemantic, core.tensor
    integers, floats = {}, {"fp16", "bf16", "fp32", "fp64"}
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    constant = semantic.scalar_constant
    constants: dict[tuple[str, int], Any] = {}
    for bits in (8, 16, 32, 64):
        integers[f"int{bits}"] = range(-(2 ** (bits - 1)), 2 ** (bits - 1))
        integers[f"uint{bits}"] = range(2**bits)

    def takes(dtype, value, div_or_mod) -> bool:
        """Whether an integer beside a block of this type is of this type."""
        if value not in _INT32:
            return False
        if dtype.name in floats:
            return not div_or_mod or dtype.name in ("fp32", "fp64")
        return value in integers.get(dtype.name, ())

    def checked(self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False):
        left, right = type(lhs) is tensor, type(rhs) is tensor
        if left and right:
            one, other = lhs.dtype, rhs.dtype
            if one is other or one.name == other.name:
                if one.name in integers or (one.name in floats and (not div_or_mod or one.primitive_bitwidth > 16)):
                    return self.broadcast_impl_value(lhs, rhs)
            elif allow_lhs_ptr and one.is_ptr() and other.name in integers:
                return self.broadcast_impl_value(lhs, rhs)
        elif arithmetic_check and left and type(rhs) is int and takes(lhs.dtype, rhs, div_or_mod):
            return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, lhs.dtype))
        elif arithmetic_check and right and type(lhs) is int and takes(rhs.dtype, lhs, div_or_mod):
            return self.broadcast_impl_value(self.scalar_constant(lhs, rhs.dtype), rhs)
        return check(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    def broadcast_value(self, lhs, rhs):
        left, right = lhs.type, rhs.type
        if left.is_block():
            if not right.is_block():
                return lhs, splat(rhs, left.shape)
            return (lhs, rhs) if left.shape.values == right.shape.values else broadcast(self, lhs, rhs)
        return (splat(lhs, right.shape), rhs) if right.is_block() else (lhs, rhs)

    def splat(scalar, shape):
        number = scalar.handle
        data = np.empty(shape.values, interpreter._get_np_dtype(number.dtype))
        data[...] = number.data
        return tensor(type(number)(data, number.dtype.scalar), core.block_type(scalar.dtype, shape))

    def scalar_constant(self, value, dtype):
        if type(value) is not int or value not in _INT32:
            return constant(self, value, dtype)
        key = dtype.name, value
        if key not in constants:
            constants[key] = constant(self, value, dtype)
        return constants[key]

    def to_tensor(self, x, check_type=True):
        return x if type(x) is tensor else convert(self, x, check_type)

    def cast_to(self, value, dst_ty, fp_downcast_rounding=None):
        if type(dst_ty) is core.dtype and value.dtype.name == dst_ty.name:
            return value
        return cast(self, value, dst_ty, fp_downcast_rounding)

    convert, cast = semantic.to_tensor, semantic.cast
    yield semantic, "to_tensor", to_tensor
    yield semantic, "cast", cast_to
    yield semantic, "binary_op_type_checking_impl", checked
    yield semantic, "broadcast_impl_value", broadcast_value
    yield semantic, "scalar_constant", scalar_constant


def _handles(interpreter, core) -> Iterator[Part]:
    """What holds the numbers of a tensor."""
    handle = interpreter.TensorHandle
    check = handle.__post_init__

    def post_init(self):
        dtype = self.dtype
        if type(dtype) is core.dtype and self.data.itemsize * 8 <= max(8, dtype.primitive_bitwidth):
            return
        check(self)

    yield handle, "__post_init__", post_init


def product(a, b, dtype):
    """a @ b, (..., M, K) by (..., K, N), each element summed in the order of K."""
    a, b = a.astype(dtype, copy=False), b.astype(dtype, copy=False)
    total = a[..., :1] * b[..., :1, :]
    for k in range(1, a.shape[-1]):
        total += a[..., k : k + 1] * b[..., k : k + 1, :]
    return total


def _dots(interpreter, tl) -> Iterator[Part]:
    handle, convert = interpreter.TensorHandle, interpreter._convert_float

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        first, second = a.data, b.data
        if any(one.dtype.primitive_bitwidth == 8 and one.dtype.is_floating() for one in (a, b)):
            first, second = (convert(one.data, one.dtype, tl.float16, None).view(np.float16) for one in (a, b))
        return handle(product(first, second, d.data.dtype) + d.data, d.dtype.scalar)

    yield interpreter.InterpreterBuilder, "create_dot", create_dot


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
    yield from _dots(interpreter, tl)
    yield from _dtypes(interpreter)
    yield from _calls(interpreter, tl.core)
    yield from _operands(interpreter, tl.core)
    yield from _handles(interpreter, tl.core)


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
    """The interpreter as it is without `install`, except for products, for the test that compares the two."""
    quicker = [(owner, name, value) for owner, name, value in _before if name != "create_dot"]
    replaced = [(owner, name, vars(owner)[name]) for owner, name, _ in quicker]
    for owner, name, value in quicker:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in replaced:
            setattr(owner, name, value)
