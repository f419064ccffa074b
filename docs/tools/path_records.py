"""The records of `path_tracer`: what the processes of a server entered, joined with the source."""

import ast
import mmap
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import NamedTuple

import loraplex
from loraplex.core.environment import server_environment
from tools.path_tracer.sitecustomize import FOLDER, LENGTH_BYTES, PACKAGE, RECORD_BYTES, WINDOW

SOURCE = Path(loraplex.__file__).parent
WAIT_SECONDS = 60.0
"""Limit on a busy machine; an idle one takes milliseconds."""
_POLL_SECONDS = 0.1
_SCOPE_OF_COMPREHENSION = re.compile(r"<(list|set|dict)comp>\.<locals>\.")
"""Part of qualified names before Python 3.12."""


class Function(NamedTuple):
    """A function or lambda of the source."""

    name: str
    """FILE:NAME; the second function of one name in a file has #2 at its end."""
    num_lines: int
    num_statements: int
    """Statements without the docstring, and without those of nested functions."""

    @property
    def file(self) -> str:
        return self.name.partition(":")[0]


class Entry(NamedTuple):
    """One entry of a function, or the resumption of a coroutine or generator."""

    time_ns: int
    process: str
    callers: tuple[Function, ...]
    """Functions of loraplex on the stack, the outermost first."""
    function: Function

    @property
    def stack(self) -> tuple[str, ...]:
        """Process and names: what entries with the same callers have in common."""
        return (self.process, *(one.name for one in self.callers), self.function.name)


class Window(NamedTuple):
    """Time in which entries were recorded."""

    start_ns: int
    end_ns: int


class PathTracer:
    """Folder of the records of a server's processes, and the window that they share."""

    def __init__(self, folder: Path, package: Path = SOURCE) -> None:
        folder.mkdir()
        self._folder, self._package = folder, package
        with (folder / WINDOW).open("w+b") as file:
            file.truncate(1)
            self._is_open = mmap.mmap(file.fileno(), 1)

    def environment(self) -> dict[str, str]:
        """Return the environment of a program that is traced, with all that it starts."""
        environment = server_environment()
        places = (str(Path(__file__).parent / "path_tracer"), environment.get("PYTHONPATH"))
        return environment | {
            "PYTHONPATH": os.pathsep.join(filter(None, places)),
            FOLDER: str(self._folder),
            PACKAGE: str(self._package),
        }

    @contextmanager
    def window(self) -> Iterator[None]:
        """Record while the context is open. The entries are those of the last window."""
        self._since_ns = time.monotonic_ns()
        self._is_open[0] = 1
        try:
            yield
        finally:
            self._is_open[0] = 0

    def wait_for(self, function: str) -> None:
        """Wait until a function was entered in the window. Raises TimeoutError."""
        deadline = time.monotonic() + WAIT_SECONDS
        while all(entry.function.name != function for entry in self.entries()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function} was not entered")
            time.sleep(_POLL_SECONDS)

    def entries(self) -> list[Entry]:
        """Return the entries of all processes in the last window, in order of their times."""
        records = sorted(self._folder.glob("*.record"))
        return sorted(entry for record in records for entry in self._entries_of(record))

    def _entries_of(self, record: Path) -> Iterator[Entry]:
        with record.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if length > RECORD_BYTES:
                raise RuntimeError(f"the record of a process is full at {RECORD_BYTES} bytes")
            command, *lines = file.read(length - LENGTH_BYTES).decode().splitlines()
        process = _process_name(command.split("\t"))
        stacks: dict[str, tuple[Function | None, ...]] = {}
        for line in lines:
            head, number, *names = line.split("\t")
            if head == "=":
                stacks[number] = tuple(map(self._function, names))
            elif int(head) >= self._since_ns and (entered := stacks[number][-1]) is not None:
                callers = tuple(one for one in stacks[number][:-1] if one is not None)
                yield Entry(int(head), process, callers, entered)

    def _function(self, recorded: str) -> Function | None:
        """Return a recorded function; None: it is a comprehension or the body of a class."""
        file, line, name = recorded.split(":", 2)
        name = _SCOPE_OF_COMPREHENSION.sub("", name)
        return functions_of(self._package, file).get((int(line), name))


def _process_name(command: list[str]) -> str:
    """Return the last part of the module that runs; the server itself is `serving`."""
    module = command[command.index("-m") + 1] if "-m" in command else Path(command[-1]).stem
    return "serving" if module == "loraplex" else module.rpartition(".")[2]


@cache
def functions_of(package: Path, file: str) -> Mapping[tuple[int, str], Function]:
    """Return the functions of a file by first line (that of a decorator) and qualified name."""
    found: dict[tuple[int, str], Function] = {}
    num_named: dict[str, int] = {}
    tree = ast.parse((package / file).read_text(encoding="utf-8"))
    for node, name in _definitions(tree, ""):
        num_named[name] = count = num_named.get(name, 0) + 1
        suffix = f"#{count}" if count > 1 else ""
        decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        found[first, name] = Function(f"{file}:{name}{suffix}", lines, _num_statements(node))
    return found


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def _definitions(node: ast.AST, scope: str) -> Iterator[tuple[_Definition, str]]:
    """Find functions and lambdas with their qualified names, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        inner = scope
        if isinstance(child, _Definition):
            name = scope + ("<lambda>" if isinstance(child, ast.Lambda) else child.name)
            yield child, name
            inner = f"{name}.<locals>."
        elif isinstance(child, ast.ClassDef):
            inner = f"{scope}{child.name}."
        elif isinstance(child, ast.GeneratorExp):
            inner = f"{scope}<genexpr>.<locals>."
        yield from _definitions(child, inner)


def _num_statements(node: _Definition) -> int:
    if isinstance(node, ast.Lambda):
        return 1
    has_docstring = ast.get_docstring(node, clean=False) is not None
    return sum(map(_statements_in, node.body)) - has_docstring


def _statements_in(node: ast.AST) -> int:
    """Count a node's statements; a nested function is one."""
    inside = () if isinstance(node, _Definition) else ast.iter_child_nodes(node)
    return isinstance(node, ast.stmt) + sum(map(_statements_in, inside))


def imported_packages(package: Path, file: str) -> set[str]:
    """Return the packages of others that a file imports, without Python's own."""
    tree = ast.parse((package / file).read_text(encoding="utf-8"))
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules.add(node.module)
    tops = {module.partition(".")[0] for module in modules}
    return tops - sys.stdlib_module_names - {package.name}
