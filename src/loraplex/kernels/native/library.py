"""Finds and loads the compiled kernels that suit this CPU, and holds their threads.

Owns the border (native/include/loraplex/abi.h): versions, argument types, status codes. Does not
know the ops: each family of them declares its functions where it wraps them.
"""

import copy
import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from loraplex.core.errors import DeviceLost, InternalError

LIBRARY_FOLDER = Path(__file__).parent / "lib"

INSTRUCTION_SETS = ("x86-64-v4", "x86-64-v3", "aarch64-neon", "generic")
"""Those that `load_library` tries, the best first."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""loraplex_dtype"""

Pointer = ctypes.c_void_p
"""Address that stays: of weights, KV storage, a thread pool."""


class Value(ctypes.c_void_p):
    """Address of a tensor or structure of one step: an input of the step, or an op's output."""


class Source(ctypes.c_void_p):
    """Address of a tensor that stays, or of an op's output."""


Size = ctypes.c_int64
Int = ctypes.c_int32
Real = ctypes.c_float

_ABI_VERSION = 21
_FILES = {
    "x86-64-v4": "libloraplex_v4.so",
    "x86-64-v3": "libloraplex_v3.so",
    "aarch64-neon": "libloraplex_neon.so",
    "generic": "libloraplex_generic.so",
}
_NEEDED_FEATURE = {"x86-64-v4": 2, "x86-64-v3": 1, "aarch64-neon": 4, "generic": 0}
_STATUS = {
    1: "an argument is invalid",
    2: "this library has no kernel for the arguments",
    3: "out of memory",
    4: "the operating system refused, or a defect",
    6: "the ranks exchange different numbers of bytes: each must compute the same steps",
}
_ABORTED = 5

NativeFunction = Callable[..., None]
"""Takes numbers only (addresses as int). Raises InternalError if the function reports a failure,
DeviceLost if another rank aborted the exchange that it takes part in."""

Watch = Callable[[str, NativeFunction, Sequence[Any]], NativeFunction]
"""Given the name, the function and its argument types: a function to call instead."""

Note = Callable[[torch.Tensor], torch.Tensor]
"""Given the tensor that an op is about to write, returns it."""


CPU_AMX_BF16 = 64
CPU_AVX512_BF16 = 128
CPU_NEON_BF16 = 512
"""LORAPLEX_CPU_* of abi.h that change the bits of bfloat16 products (ADR 47, 49, 52, 53)."""
CPU_BFLOAT16_ORDERS = CPU_AMX_BF16 | CPU_AVX512_BF16 | CPU_NEON_BF16
_ORDERS = {
    "x86-64-v4": {CPU_AMX_BF16: "AMX", CPU_AVX512_BF16: "AVX512-BF16"},
    "aarch64-neon": {CPU_NEON_BF16: "BF16"},
}
"""Their names, by the instruction set whose library has kernels for them; the first is used."""


class NativeLibraryError(Exception):
    """No library works here; the message contains the reason."""


class NativeLibrary:
    """One loaded library. The CPU must have its instruction set."""

    def __init__(self, path: Path) -> None:
        """Raises NativeLibraryError if the file is missing, broken or of another version."""
        try:
            self._dll = ctypes.CDLL(str(path))
            version = self._dll.loraplex_abi_version()
        except (OSError, AttributeError) as error:
            raise NativeLibraryError(f"cannot load {path}: {error}") from error
        if version != _ABI_VERSION:
            raise NativeLibraryError(
                f"{path} has ABI version {version}, this loraplex needs {_ABI_VERSION}: install "
                "loraplex again"
            )
        self._watch: Watch | None = None
        self._note: Note | None = None
        self.instruction_set = self.text_function("loraplex_instruction_set")()

    @property
    def arithmetic(self) -> str:
        """Name of the instructions that decide the bits of results: equal on equal names."""
        orders = _ORDERS.get(self.instruction_set, {})
        used = next((name for bit, name in orders.items() if self.cpu_features() & bit), None)
        return self.instruction_set if used is None else f"{self.instruction_set} with {used}"

    def watched(self, watch: Watch, note: Note) -> "NativeLibrary":
        """The same library; its functions are what `watch` makes of them, `note` sees outputs."""
        library = copy.copy(self)
        library._watch, library._note = watch, note
        return library

    def output(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """A new tensor, which an op of this library writes."""
        tensor = torch.empty(shape, dtype=dtype)
        return tensor if self._note is None else self._note(tensor)

    def function(self, name: str, *argument_types: Any) -> NativeFunction:
        """A function that returns a loraplex_status."""
        function: Any = self._dll[name]
        function.argtypes = argument_types
        function.restype = ctypes.c_int32
        function.errcheck = _check_status
        return function if self._watch is None else self._watch(name, function, argument_types)

    def size_function(self, name: str, *argument_types: Any) -> Callable[..., int]:
        """A function that returns an int64_t and cannot fail."""
        function: Any = self._dll[name]
        function.argtypes = argument_types
        function.restype = ctypes.c_int64
        return function  # type: ignore[no-any-return]

    def pointer_function(self, name: str, *argument_types: Any) -> Callable[..., int | None]:
        """A function that returns an address, or None."""
        function: Any = self._dll[name]
        function.argtypes = argument_types
        function.restype = ctypes.c_void_p
        return function  # type: ignore[no-any-return]

    def text_function(self, name: str, *argument_types: Any) -> Callable[..., str]:
        """A function that returns a string and cannot fail."""
        function: Any = self._dll[name]
        function.argtypes = argument_types
        function.restype = ctypes.c_char_p
        return lambda *arguments: function(*arguments).decode(errors="replace")

    def cpu_features(self) -> int:
        """LORAPLEX_CPU_* of abi.h"""
        self._dll.loraplex_cpu_features.restype = ctypes.c_uint64
        return int(self._dll.loraplex_cpu_features())


def _in_process(process_id: int, end: Callable[[int], None], address: int) -> None:
    """End threads in the process that has them: a forked child would wait for them for ever."""
    if os.getpid() == process_id:
        end(address)


class ThreadPool:
    """The threads of one backend. They end with the object."""

    def __init__(self, library: NativeLibrary, num_threads: int) -> None:
        """num_threads counts the thread that calls."""
        create = library.function("loraplex_pool_create", Int, ctypes.POINTER(Pointer))
        destroy = library.function("loraplex_pool_destroy", Pointer)
        self._set_num_threads = library.function("loraplex_pool_set_num_threads", Pointer, Int)
        self._limit_cpu_features = library.function(
            "loraplex_pool_limit_cpu_features", Pointer, ctypes.c_uint64
        )
        self._num_threads = library.size_function("loraplex_pool_num_threads", Pointer)
        self._lora_ns = library.size_function("loraplex_pool_lora_ns", Pointer)
        handle = Pointer()
        create(num_threads, ctypes.byref(handle))
        assert handle.value is not None
        self.address: int = handle.value
        """The loraplex_pool that an op takes."""
        weakref.finalize(self, _in_process, os.getpid(), destroy, self.address)

    @property
    def num_threads(self) -> int:
        return self._num_threads(self.address)

    @property
    def lora_ns(self) -> int:
        """Time that ops of LoRA have taken so far."""
        return self._lora_ns(self.address)

    def limit_cpu_features(self, features: int) -> None:
        """Ops use none of LORAPLEX_CPU_* of abi.h but these: how a test runs another CPU's code."""
        self._limit_cpu_features(self.address, features)

    def set_num_threads(self, num_threads: int) -> None:
        """Not while another thread is in an op: it would be waited for."""
        self._set_num_threads(self.address, num_threads)


def available_instruction_sets(folder: Path = LIBRARY_FOLDER) -> tuple[str, ...]:
    """Those that were built and that this CPU has, the best first.

    Raises NativeLibraryError if nothing was built.
    """
    generic = folder / _FILES["generic"]
    if not generic.exists():
        raise NativeLibraryError(f"there is no {generic}")
    features = NativeLibrary(generic).cpu_features()
    return tuple(
        name
        for name in INSTRUCTION_SETS
        if (features & _NEEDED_FEATURE[name]) == _NEEDED_FEATURE[name]
        and (folder / _FILES[name]).exists()
    )


def load_library(
    instruction_sets: Sequence[str] = INSTRUCTION_SETS, folder: Path = LIBRARY_FOLDER
) -> NativeLibrary:
    """The library of the first of these sets that was built and that this CPU has.

    Raises NativeLibraryError if there is none.
    """
    available = available_instruction_sets(folder)
    for name in instruction_sets:
        if name in available:
            return NativeLibrary(folder / _FILES[name])
    raise NativeLibraryError(
        f"none of {', '.join(instruction_sets)} in {folder}; there are {', '.join(available)}"
    )


def _check_status(status: int, function: Any, arguments: tuple[Any, ...]) -> None:
    if status == _ABORTED:
        raise DeviceLost(f"{function.__name__}: another rank aborted the exchange")
    if status != 0:
        reason = _STATUS.get(status, f"status {status}")
        raise InternalError(f"{function.__name__} failed: {reason} (called with {arguments})")
