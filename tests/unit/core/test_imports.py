"""Imports without garbage collection."""

import gc

import pytest

from loraplex.core.imports import without_collection


@pytest.fixture(autouse=True)
def collecting():
    """Garbage collection is on afterwards, too."""
    yield
    gc.enable()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collection_is_afterwards_as_before(was_enabled: bool):
    if not was_enabled:
        gc.disable()
    with without_collection():
        assert not gc.isenabled()
    assert gc.isenabled() is was_enabled
