"""Record which functions of a package this process enters while the tracer's window is open.

Python imports the first `sitecustomize` of its search path when it starts, before the program. So
every process of a server whose PYTHONPATH begins with this folder is recorded, and the server needs
no hook. `tools.request_paths` opens the window and reads the records.

A record is text: a line for each stack of the package's functions (`=`, its number, and FILE:LINE
and the name of each function, the entered one last), and a line for each entry (the time in ns and
the number of its stack). It is written through memory that is mapped when the process starts, so
processes that may not open files are recorded, too. Python 3.12 and newer report entries by
sys.monitoring, earlier ones by sys.settrace. Both report the start of functions and each
resumption of coroutines and generators.
"""

import mmap
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

FOLDER = "PATH_TRACER_FOLDER"
"""Variable with the folder of the records and of the window."""
PACKAGE = "PATH_TRACER_PACKAGE"
"""Variable with the folder of the package."""
WINDOW = "window"
"""File of one byte, which is not 0 while the window is open."""
RECORD_BYTES = 32 << 20
"""Size of a record's file, which takes disk space only where it is written."""
LENGTH_BYTES = 8
"""Bytes at the beginning of a record that hold the length of its text, plus their own."""


class _Recorder:
    def __init__(self, folder: Path, package: str) -> None:
        with (folder / WINDOW).open("rb") as file:
            self._window = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
        with (folder / f"{os.getpid()}.record").open("w+b") as file:
            file.truncate(RECORD_BYTES)
            self._record = mmap.mmap(file.fileno(), RECORD_BYTES)
        self._package = package + os.sep
        self._end = LENGTH_BYTES
        self._stacks: dict[tuple[CodeType, ...], int] = {}
        self._lock = threading.RLock()
        self._write("\t".join(sys.orig_argv))

    def start(self) -> None:
        """Record all threads from now on."""
        monitoring: Any = getattr(sys, "monitoring", None)
        if monitoring is None:
            threading.settrace(self._called)
            sys.settrace(self._called)
            return
        tool, events = monitoring.PROFILER_ID, monitoring.events

        def entered(code: CodeType, _offset: int) -> object:
            if not code.co_filename.startswith(self._package):
                return monitoring.DISABLE
            if self._window[0]:
                self._note(sys._getframe(1))
            return None

        monitoring.use_tool_id(tool, "path_tracer")
        for event in (events.PY_START, events.PY_RESUME):
            monitoring.register_callback(tool, event, entered)
        monitoring.set_events(tool, events.PY_START | events.PY_RESUME)

    def _called(self, frame: FrameType, _event: str, _argument: object) -> None:
        """Take a call event of sys.settrace. The result, None, refuses other events."""
        if self._window[0] and frame.f_code.co_filename.startswith(self._package):
            self._note(frame)

    def _note(self, entered: FrameType) -> None:
        now_ns = time.monotonic_ns()  # a clock that all processes share
        codes: list[CodeType] = []
        frame: FrameType | None = entered
        while frame is not None:
            if frame.f_code.co_filename.startswith(self._package):
                codes.append(frame.f_code)
            frame = frame.f_back
        stack = tuple(reversed(codes))
        with self._lock:
            number = self._stacks.get(stack)
            if number is None:
                number = self._stacks[stack] = len(self._stacks)
                self._write("\t".join(("=", f"{number}", *map(self._name, stack))))
            self._write(f"{now_ns}\t{number}")

    def _name(self, code: CodeType) -> str:
        file = code.co_filename.removeprefix(self._package)
        return f"{file}:{code.co_firstlineno}:{code.co_qualname}"

    def _write(self, line: str) -> None:
        data = line.encode() + b"\n"
        start, self._end = self._end, self._end + len(data)
        if self._end <= RECORD_BYTES:
            self._record[start : self._end] = data
        self._record[:LENGTH_BYTES] = self._end.to_bytes(LENGTH_BYTES, "little")


if FOLDER in os.environ:
    _Recorder(Path(os.environ[FOLDER]), os.environ[PACKAGE]).start()
