"""Makes Triton's interpreter several times as fast; what it computes and refuses stays the same.

It spends its time on descriptions of types and shapes, which it builds and compares anew for every operation of every program: here
they are built once. It also searches Triton's language for what to replace at every launch and at every call of a function inside a
kernel: here that is found once, and replaced once a launch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def speed_up() -> None:
    """Once in a process."""
    _describe_types_once()
    _compare_types_quickly()
    _patch_once()
    # which computes each sum of integers again in 64 bits, for an assertion that only a debugger's mode looks at
    interpreter.interpreter_builder.options = replace(interpreter.InterpreterOptions(), sanitize_overflow=False)


def _describe_types_once() -> None:
    np_dtype, make_block = interpreter._get_np_dtype, tl.block_type.__init__
    np_dtypes: dict[str, Any] = {}
    known: dict[tuple[int, ...], tuple[Any, Any, Any]] = {}  # equal shapes are one object

    def np_dtype_once(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(kind)
        return np_dtypes[name]

    def block(self: Any, element: Any, shape: Any) -> None:
        sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
        if sizes not in known:
            make_block(self, element, shape)  # checks the shape
            known[sizes] = self.shape, self.numel, tensor_shape(sizes)
        self.element_ty = element
        self.shape, self.numel, self.of_tensors = known[sizes]

    def tensor_shape(sizes: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    scalar = tensor_shape(())

    def tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = kind.of_tensors if kind.is_block() else scalar

    interpreter._get_np_dtype = np_dtype_once
    tl.block_type.__init__ = block
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>", lambda self, name: None)
    tl.tensor.__init__ = tensor


def _compare_types_quickly() -> None:
    equal, cast, broadcast = tl.dtype.__eq__, TritonSemantic.cast, TritonSemantic.broadcast_impl_value

    def cast_unless_same(self: Any, value: Any, kind: Any, rounding: Any = None) -> Any:
        return value if value.dtype is kind else cast(self, value, kind, rounding)

    def broadcast_unless_same(self: Any, first: Any, second: Any) -> Any:
        if first.type.is_block() and second.type.is_block() and first.type.shape is second.type.shape:
            return first, second
        return broadcast(self, first, second)

    true, equal_tuples = tl.constexpr(True), tl.tuple.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or equal(self, other)
    tl.tuple.__eq__ = lambda self, other: true if self is other else equal_tuples(self, other)
    TritonSemantic.cast = cast_unless_same
    TritonSemantic.broadcast_impl_value = broadcast_unless_same


def _patch_once() -> None:
    """The replacements of a language for a launch, and none for a function inside the kernel that sees no other modules of it."""
    patch_lang, run_grid = interpreter._patch_lang, interpreter.GridExecutor.__call__
    found: dict[tuple[bool, ...], list[tuple[Any, str, Any]]] = {}
    patched: set[tuple[bool, ...]] = set()

    def patch(member: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            return member(*arguments, **{**options, "_semantic": semantic})

        return call

    semantic = interpreter.interpreter_semantic

    def patch_attribute(holder: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        scope.set_attr(holder, name, patch(getattr(member, "__wrapped__", member)))

    def patch_lang_once(fn: Any) -> Any:
        seen = tuple(language in fn.__globals__.values() for language in (tl, tl.core))
        if seen in patched:
            return interpreter._LangPatchScope()
        patched.add(seen)
        if seen not in found:
            scope = patch_lang(fn)
            found[seen] = [(holder, name, getattr(holder, name)) for holder, name, _ in scope._changes]
            return scope
        scope = interpreter._LangPatchScope()
        for holder, name, replacement in found[seen]:
            scope.set_attr(holder, name, replacement)
        return scope

    def run(self: Any, *arguments: Any, **options: Any) -> Any:
        patched.clear()
        return run_grid(self, *arguments, **options)

    interpreter._patch_attr = patch_attribute
    interpreter._patch_lang = patch_lang_once
    interpreter.GridExecutor.__call__ = run
