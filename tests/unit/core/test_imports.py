"""Imports without garbage collection, and modules that are imported when they are used."""

import gc
import importlib
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

from loraplex.core.imports import deferred, without_collection


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


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Name of a package that imports a module `late`, as torch imports its own."""
    folder = tmp_path / "imports_late"
    folder.mkdir()
    (folder / "__init__.py").write_text("from imports_late import late")
    (folder / "late.py").write_text("VALUE = 5")
    monkeypatch.syspath_prepend(tmp_path)
    yield folder.name
    for name in (folder.name, f"{folder.name}.late"):
        sys.modules.pop(name, None)


def is_imported(module: ModuleType) -> bool:
    return "VALUE" in vars(module)


def test_deferred_module_is_imported_when_it_is_used(package: str):
    with deferred(f"{package}.late"):
        imported = importlib.import_module(package)
    late = imported.late
    assert not is_imported(sys.modules[f"{package}.late"])
    assert late.VALUE == 5
    assert is_imported(imported.late)
    assert imported.late is sys.modules[f"{package}.late"]


def test_inspection_of_all_modules_imports_no_deferred_one(package: str):
    with deferred(f"{package}.late"):
        imported = importlib.import_module(package)
    inspect.getmodule(is_imported)
    assert not hasattr(imported.late, "__file__")
    assert not is_imported(imported.late)


def test_deferred_module_can_be_imported_at_once(package: str):
    with deferred(f"{package}.late") as import_now:
        imported = importlib.import_module(package)
        import_now()
    assert is_imported(imported.late)


def test_module_that_was_imported_earlier_stays(package: str):
    earlier = importlib.import_module(package).late
    with deferred(f"{package}.late") as import_now:
        assert import_now() is earlier
    assert sys.modules[f"{package}.late"] is earlier
