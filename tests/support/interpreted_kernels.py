"""Triton's interpreter without the half of its work that changes nothing."""

import functools
import types
from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter


def patch_once_in_a_launch() -> None:
    """Let the functions that a kernel calls use Triton's language as the kernel has patched it.

    A launch replaces the functions of the language by interpreted ones until its end. The
    interpreter does so again in each call of a function of the kernel, which finds them replaced.
    """
    patch: Callable[[Any], Any] = interpreter._patch_lang
    patched = set[frozenset[int]]()

    def patch_first(function: types.FunctionType) -> Any:
        modules = _languages(function)
        if modules in patched:
            return _NothingToRestore()
        is_launch = not patched
        patched.add(modules)
        return _Launch(patch(function), patched) if is_launch else patch(function)

    interpreter._patch_lang = patch_first


class _Launch:
    """What restores the language at the end of a launch."""

    def __init__(self, scope: Any, patched: set[frozenset[int]]) -> None:
        self._scope = scope
        self._patched = patched

    def restore(self) -> None:
        self._patched.clear()
        self._scope.restore()


class _NothingToRestore:
    def restore(self) -> None:
        """Nothing was patched."""


@functools.cache
def _languages(function: types.FunctionType) -> frozenset[int]:
    """Return the identities of the modules of the language that a function can name."""
    named = function.__globals__.values()
    return frozenset(id(m) for m in (language, language.core) if any(m is value for value in named))
