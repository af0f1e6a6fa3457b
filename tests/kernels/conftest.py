"""Triton's interpreter in less time: it searches its language anew for each function that a kernel calls.  And its
products with rows that do not depend on each other: as on a GPU, but not in numpy on every processor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kernels.provider import has_triton


class PatchedOnce:
    """In place of the interpreter's `_patch_lang`: what a kernel's launch has patched, its functions find patched."""

    def __init__(self, patch: Callable[[Any], Any], empty: Callable[[], Any]) -> None:
        self._patch = patch
        self._empty = empty
        self._patched: set[int] = set()  # modules of the language, while a launch goes on

    def __call__(self, function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if is_language(value)}
        if modules <= self._patched:
            return self._empty()
        before, scope = set(self._patched), self._patch(function)
        self._patched |= modules
        restore = scope.restore

        def forget() -> None:
            self._patched = before
            restore()

        scope.restore = forget
        return scope


def is_language(value: object) -> bool:
    return inspect.ismodule(value) and value.__name__ in ("triton.language", "triton.language.core")


def dot_by_rows(dot: Callable[..., Any], handle: Callable[..., Any]) -> Callable[..., Any]:
    """In place of the interpreter's `create_dot`: sums go along k, for each element by itself."""

    def create_dot(builder: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if 8 in (a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth):
            return dot(builder, a, b, d, *options)
        x, y = (value.data.astype(d.data.dtype) for value in (a, b))
        return handle((x[..., :, :, None] * y[..., None, :, :]).sum(axis=-2) + d.data, d.dtype.scalar)

    return create_dot


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    if not has_triton():
        yield
        return
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # of an older triton
        yield
        return
    with pytest.MonkeyPatch.context() as patched:
        made = PatchedOnce(interpreter._patch_lang, interpreter._LangPatchScope)
        patched.setattr(interpreter, "_patch_lang", made)
        builder = interpreter.InterpreterBuilder
        patched.setattr(builder, "create_dot", dot_by_rows(builder.create_dot, interpreter.TensorHandle))
        yield
