"""The right library is chosen, a wrong one is refused in words, and its threads share the work."""

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from loraplex.core.errors import InternalError
from loraplex.kernels import dispatch
from loraplex.kernels.native import library as native
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import (
    CPU_AMX_BF16,
    CPU_AVX512_BF16,
    CPU_BFLOAT16_ORDERS,
    CPU_NEON_BF16,
    INSTRUCTION_SETS,
    LIBRARY_FOLDER,
    NativeLibrary,
    NativeLibraryError,
    ThreadPool,
    available_instruction_sets,
    load_library,
)
from loraplex.kernels.reference import ReferenceKernels
from support.eventually import eventually
from support.naming import naming

CPU = torch.device("cpu")

needs_library = pytest.mark.skipif(
    not LIBRARY_FOLDER.exists(), reason="loraplex was installed without a compiler"
)


@pytest.fixture
def fresh_dispatch(monkeypatch):
    """dispatch with nothing remembered; a library that it loads is forgotten again."""
    dispatch._host_library.cache_clear()
    yield monkeypatch
    dispatch._host_library.cache_clear()


@pytest.fixture
def whole_affinity():
    """The cores that this thread may use, as they are when the test ends, too."""
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux has masks of cores")
    cores = os.sched_getaffinity(0)
    yield cores
    os.sched_setaffinity(0, cores)


@needs_library
def test_every_available_library_says_what_it_is() -> None:
    available = available_instruction_sets()
    assert available[-1] == "generic"
    assert [load_library((name,)).instruction_set for name in available] == list(available)


@needs_library
def test_the_best_available_library_is_loaded() -> None:
    assert load_library().instruction_set == available_instruction_sets()[0]


@needs_library
def test_an_order_of_preference_is_kept() -> None:
    assert load_library(("no such set", "generic", *INSTRUCTION_SETS)).instruction_set == "generic"


@needs_library
def test_a_cpu_gets_no_library_that_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeLibrary, "cpu_features", lambda self: 0)
    assert available_instruction_sets() == ("generic",)
    with pytest.raises(NativeLibraryError, match=naming("x86-64-v3", "generic")):
        load_library(("x86-64-v3",))


@needs_library
@pytest.mark.parametrize(
    ("instruction_set", "features", "arithmetic"),
    [
        ("x86-64-v4", CPU_AMX_BF16, "x86-64-v4 with AMX"),
        ("x86-64-v4", CPU_AVX512_BF16, "x86-64-v4 with AVX512-BF16"),
        ("x86-64-v4", CPU_AMX_BF16 | CPU_AVX512_BF16, "x86-64-v4 with AMX"),
        ("x86-64-v4", ~CPU_BFLOAT16_ORDERS, "x86-64-v4"),
        ("x86-64-v3", CPU_BFLOAT16_ORDERS, "x86-64-v3"),
        ("aarch64-neon", CPU_NEON_BF16, "aarch64-neon with BF16"),
        ("aarch64-neon", ~CPU_BFLOAT16_ORDERS, "aarch64-neon"),
        ("generic", CPU_BFLOAT16_ORDERS, "generic"),
    ],
)
def test_instructions_for_bfloat16_are_part_of_what_decides_bits(
    instruction_set: str, features: int, arithmetic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = load_library(("generic",))
    monkeypatch.setattr(NativeLibrary, "cpu_features", lambda self: features)
    monkeypatch.setattr(library, "instruction_set", instruction_set)
    assert library.arithmetic == arithmetic


@pytest.mark.slow
@needs_library
def test_libraries_in_one_process_do_not_mix() -> None:
    """A symbol that is unique in the process would make one library run another's code."""
    script = """
import sys, torch
from loraplex.kernels.native.backend import NativeKernels
from loraplex.kernels.native.library import load_library
for name in sys.argv[1:]:
    kernels = NativeKernels(load_library((name,)), 1)
    weight, x = torch.randn(40, 70), torch.randn(9, 70)
    torch.testing.assert_close(kernels.linear(x, kernels.pack_linear(weight, None)), x @ weight.T)
"""
    names = available_instruction_sets()
    for order in (names, names[::-1]):
        subprocess.run([sys.executable, "-c", script, *order], check=True)


def test_a_folder_without_libraries(tmp_path) -> None:
    with pytest.raises(NativeLibraryError, match=naming("libloraplex_generic.so")):
        load_library(folder=tmp_path)


def test_a_file_that_is_no_library(tmp_path) -> None:
    (tmp_path / "libloraplex_generic.so").write_bytes(b"not a library")
    with pytest.raises(NativeLibraryError, match=naming("libloraplex_generic.so")):
        load_library(folder=tmp_path)


@needs_library
def test_a_library_of_another_version(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(LIBRARY_FOLDER / "libloraplex_generic.so", tmp_path)
    monkeypatch.setattr(native, "_ABI_VERSION", 0)
    with pytest.raises(NativeLibraryError, match=naming("ABI", 0)):
        load_library(folder=tmp_path)


@needs_library
def test_a_failing_function_is_an_error_that_names_it() -> None:
    library = load_library()
    with pytest.raises(InternalError, match=naming("loraplex_pool_create")):
        ThreadPool(library, 0)


@needs_library
def test_a_pool_changes_its_size() -> None:
    pool = ThreadPool(load_library(), 1)
    assert pool.num_threads == 1
    for num_threads in (4, 2, 1, 3):
        pool.set_num_threads(num_threads)
        assert pool.num_threads == num_threads
    with pytest.raises(InternalError):
        pool.set_num_threads(-1)
    assert pool.num_threads == 3


@needs_library
def test_a_pool_ends_with_its_object() -> None:
    def tasks() -> set[str]:
        return {task.name for task in Path("/proc/self/task").iterdir()}

    before = tasks()
    pool = ThreadPool(load_library(), 4)
    threads = tasks() - before  # of those before, some of another test may end meanwhile
    assert len(threads) == 3
    del pool
    assert not threads & tasks()


@needs_library
@pytest.mark.skipif(
    not sys.platform.startswith("linux") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores of Linux",
)
def test_a_worker_that_wakes_keeps_off_the_core_of_its_caller(whole_affinity) -> None:
    before = set(os.listdir("/proc/self/task"))
    kernels = NativeKernels(load_library(), num_threads=2)
    (worker,) = set(os.listdir("/proc/self/task")) - before
    rows, norm = torch.ones(64, 4096), torch.ones(4096)
    core_of_this_thread = ctypes.CDLL(None).sched_getcpu

    def wakes_it_from(core: int) -> bool:
        os.sched_setaffinity(0, {core})
        os.sched_setaffinity(0, whole_affinity)
        assert eventually(lambda: _is_asleep(worker))
        first = core_of_this_thread()
        kernels.rms_norm(rows, norm, 1e-6)
        if core_of_this_thread() != first:
            return False  # moved meanwhile: either core is right
        assert os.sched_getaffinity(int(worker)) == whole_affinity - {first}
        return core == first

    for core in sorted(whole_affinity)[:2]:
        assert eventually(lambda core=core: wakes_it_from(core))


def _is_asleep(thread: str) -> bool:
    return Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@needs_library
def test_more_threads_than_cores_may_run_on_each_of_them(whole_affinity) -> None:
    before = set(os.listdir("/proc/self/task"))
    kernels = NativeKernels(load_library(), num_threads=len(whole_affinity) + 1)
    workers = set(os.listdir("/proc/self/task")) - before
    for worker in workers:
        assert eventually(lambda worker=worker: _is_asleep(worker))
    kernels.rms_norm(torch.ones(64, 4096), torch.ones(4096), 1e-6)
    assert all(os.sched_getaffinity(int(worker)) == whole_affinity for worker in workers)


@needs_library
def test_dispatch_takes_the_native_backend_on_a_cpu(fresh_dispatch) -> None:
    assert isinstance(dispatch.select_kernels(CPU), NativeKernels)
    assert isinstance(dispatch.select_kernels(torch.device("meta")), ReferenceKernels)


def test_dispatch_says_once_what_is_lost(fresh_dispatch, caplog) -> None:
    def missing() -> NativeLibrary:
        raise NativeLibraryError("there is no libloraplex_generic.so")

    fresh_dispatch.setattr(dispatch, "load_library", missing)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert isinstance(dispatch.select_kernels(CPU), ReferenceKernels)
    (record,) = caplog.records
    assert "there is no libloraplex_generic.so" in record.getMessage()
    assert "C++20 compiler" in record.getMessage()
