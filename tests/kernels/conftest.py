"""Triton's interpreter in less time: it searches its language anew for each function that a kernel calls."""

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
        yield
