"""Imports of many modules."""

import contextlib
import gc
from collections.abc import Iterator


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
