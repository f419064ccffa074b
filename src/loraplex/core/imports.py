"""Imports of many modules."""

import contextlib
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Collect no garbage meanwhile: what an import creates stays, and visiting it again and again
    is a tenth of the time that torch takes to import.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def deferred(name: str) -> Iterator[Callable[[], ModuleType]]:
    """Keep a package from importing one of its modules meanwhile: the first use imports it.

    Yields what imports it at once. name: an absolute name below a package.
    """
    placeholder = _Deferred(name)
    sys.modules.setdefault(name, placeholder)
    yield placeholder.load
    parent, _, child = name.rpartition(".")
    # The import system takes the placeholder for the module, but does not bind it in the package.
    if parent in sys.modules and sys.modules[name] is placeholder:
        setattr(sys.modules[parent], child, placeholder)


class _Deferred(ModuleType):
    def load(self) -> ModuleType:
        """Import the module."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return importlib.import_module(self.__name__)

    def __getattr__(self, attribute: str) -> Any:
        # The inspect module looks for names such as __file__ in all modules.
        if attribute.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {attribute!r}")
        return getattr(self.load(), attribute)
