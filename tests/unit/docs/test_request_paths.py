"""The tracer of request paths: what it records, what counts, and what its limits refuse."""

import subprocess
import sys

import pytest

from tools.path_records import Entry, Function, PathTracer, functions_of, imported_packages
from tools.request_paths import (
    ARCHITECTURE,
    PATHS,
    Trace,
    on_path,
    read_baseline,
    too_long,
    with_numbers,
)

PROGRAM = """
import asyncio
import concurrent.futures
import subprocess
import sys

sys.path.insert(0, {parent!r})
from traced import work

if len(sys.argv) > 1:
    work.in_child()
else:
    asyncio.run(work.main())
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        pool.submit(work.in_thread).result()
    subprocess.run([sys.executable, "-P", __file__, "child"], check=True)
"""
PACKAGE = '''
import functools
import json
import numpy.linalg

class Work:
    def __init__(self):
        """Docstring."""
        self.value = 1

    @property
    def doubled(self):
        return 2 * self.value

    @functools.cache
    def cached(self):
        return [one for one in map(lambda x: x, (1, 2))]

async def main():
    work = Work()
    await resumed(work)
    json.dumps({})

async def resumed(work):
    def nested():
        a = 1
        if a:
            return work.doubled
    nested()
    return work.cached()

def in_thread():
    return sum(x for x in range(3))

def in_child():
    pass

def never():
    pass
'''


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "traced"
    folder.mkdir()
    (folder / "work.py").write_text(PACKAGE)
    return folder


def run(tracer: PathTracer, package) -> None:
    program = package.parent / "program.py"
    program.write_text(PROGRAM.format(parent=str(package.parent)))
    subprocess.run([sys.executable, str(program)], check=True, env=tracer.environment())


def test_functions_of_all_processes_and_threads_are_recorded_with_their_callers(tmp_path, package):
    tracer = PathTracer(tmp_path / "records", package)
    with tracer.window():
        run(tracer, package)
    entries = tracer.entries()
    names = list(dict.fromkeys(entry.function.name.removeprefix("work.py:") for entry in entries))
    assert names == [
        "main",
        "Work.__init__",
        "resumed",
        "resumed.<locals>.nested",
        "Work.doubled",
        "Work.cached",
        "Work.cached.<locals>.<lambda>",
        "in_thread",
        "in_child",
    ]
    doubled = next(entry for entry in entries if entry.function.name.endswith("doubled"))
    assert [caller.name for caller in doubled.callers] == [
        "work.py:main",
        "work.py:resumed",
        "work.py:resumed.<locals>.nested",
    ]
    tracer.wait_for("work.py:in_child")


def test_nothing_is_recorded_outside_the_window(tmp_path, package):
    tracer = PathTracer(tmp_path / "records", package)
    with tracer.window():
        run(tracer, package)
    with tracer.window():
        pass
    run(tracer, package)
    assert tracer.entries() == []


def test_statements_are_counted_without_docstrings_and_nested_functions(package):
    functions = {one.name: one for one in functions_of(package, "work.py").values()}
    statements = {
        name.removeprefix("work.py:"): one.num_statements for name, one in functions.items()
    }
    assert statements == {
        "Work.__init__": 1,
        "Work.doubled": 1,
        "Work.cached": 1,
        "Work.cached.<locals>.<lambda>": 1,
        "main": 3,
        "resumed": 3,
        "resumed.<locals>.nested": 3,
        "in_thread": 1,
        "in_child": 1,
        "never": 1,
    }
    assert functions["work.py:Work.__init__"].num_lines == 3


def test_functions_of_one_name_are_told_apart(tmp_path):  # language: quoted
    (tmp_path / "a.py").write_text("pairs = (lambda: 1,\n         lambda: 2)\n")
    names = [one.name for one in functions_of(tmp_path, "a.py").values()]
    assert names == ["a.py:<lambda>", "a.py:<lambda>#2"]


def test_packages_of_others_are_found(package):
    assert imported_packages(package, "work.py") == {"numpy"}


def function(name: str, num_lines: int = 3, num_statements: int = 2) -> Function:
    return Function(f"{name}.py:{name}", num_lines, num_statements)


def entries_of(*entered: tuple[str, str]) -> list[Entry]:
    """(process, names on the stack), one after the other."""
    return [
        Entry(time, process, tuple(map(function, callers)), function(name))
        for time, (process, names) in enumerate(entered)
        for *callers, name in [names.split()]
    ]


def path_of(*entered: tuple[str, str], idle: set[tuple[str, ...]] | None = None) -> list[str]:
    found = on_path(entries_of(*entered), "queued.py:queued", "send.py:send", idle or set())
    return [f"{process} {one.name.partition(':')[2]}" for one, process in found.items()]


def test_a_path_ends_where_its_last_function_returns():
    assert path_of(
        ("serving", "parse"),
        ("serving", "send"),
        ("serving", "send encode"),
        ("engine", "add"),
        ("serving", "writer"),
        ("engine", "add queued"),
        ("engine", "add queued insert"),
        ("engine", "plan"),
        ("serving", "abort send"),
        ("serving", "abort send remove"),
    ) == [
        "serving parse",
        "serving send",
        "serving encode",
        "engine add",
        "engine queued",
        "engine insert",
    ]


def test_the_last_call_before_the_end_hands_a_request_over():
    assert path_of(
        ("serving", "register send"),
        ("serving", "dispatch"),
        ("worker", "render"),
        ("serving", "dispatch send"),
        ("worker", "late"),
        ("engine", "queued"),
        ("serving", "abort"),
        ("serving", "abort send"),
    ) == ["serving send", "serving dispatch", "worker render", "engine queued"]


def test_what_an_idle_server_does_is_on_no_path():
    entered = (("serving", "beat tick"), ("serving", "parse tick"), ("serving", "send"))
    idle = {("serving", "beat.py:beat", "tick.py:tick")}
    path = path_of(("serving", "beat tick"), *entered, ("engine", "queued"), idle=idle)
    assert path == ["serving tick", "serving send", "engine queued"]
    only_beat = path_of(entered[0], entered[2], ("engine", "queued"), idle=idle)
    assert only_beat == ["serving send", "engine queued"]


def trace_of(*functions: Function) -> Trace:
    return Trace(dict.fromkeys(functions, "serving"), {})


def limits(*names: str) -> dict[str, object]:
    before = {"functions": 9, "files": 9, "median_statements": 2, "longest_lines": 9}
    known = {"packages": [], "entered": [f"serving {function(name).name}" for name in names]}
    return {"chat": known, "before": {"chat": before}}


@pytest.fixture
def _no_imports(monkeypatch):
    monkeypatch.setattr("tools.request_paths.imported_packages", lambda _package, _file: set())


@pytest.mark.usefixtures("_no_imports")
def test_two_functions_more_are_allowed_and_three_are_named():
    two = trace_of(*map(function, "abc"))
    assert too_long("chat", two, limits("a")) == []
    three = trace_of(*map(function, "abcd"))
    assert too_long("chat", three, limits("a")) == [
        "chat: 4 functions, the baseline has 1; new: b.py:b (serving), c.py:c (serving), "
        "d.py:d (serving)",
        "chat: 4 files, the baseline has 1; new: b.py, c.py, d.py",
    ]


@pytest.mark.usefixtures("_no_imports")
def test_fewer_functions_must_not_be_longer_ones():
    assert too_long("chat", trace_of(function("a", 60, 4)), limits("a")) == []
    assert too_long("chat", trace_of(function("a", 61, 5)), limits("a")) == [
        "chat: 5 statements a function, 2 at first",
        "chat: a.py:a has 61 lines, at most 60 are allowed",
    ]


def test_another_package_is_named(monkeypatch):
    found = {"msgspec"}
    monkeypatch.setattr("tools.request_paths.imported_packages", lambda _package, _file: found)
    expected = ["chat: imports of other packages: msgspec"]
    assert too_long("chat", trace_of(function("a")), limits("a")) == expected


def test_the_numbers_of_the_walk_are_those_of_the_lists():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    written = with_numbers(text, read_baseline())
    assert text == written, "run: python -m tools.request_paths --write"


def test_a_number_counts_the_functions_up_to_the_next_one():
    entered = [f"serving a/b.py:{name}" for name in ["first", "second", "third"]]
    baseline = {kind: {"entered": [*entered, "engine c/d.py:last"]} for kind in PATHS}
    item = "- **{}**, 0 functions in 0 files: `b.py:first` 0,\n  `b.py:third` (there) 7\n"
    text = "".join(map(item.format, PATHS)) + "\n## v1 0\n"
    assert with_numbers(text, baseline).startswith(
        "- **chat**, 4 functions in 2 files: `b.py:first` 2,\n  `b.py:third` (there) 2\n"
    )
    assert with_numbers(text, baseline).endswith(" 2\n\n## v1 0\n")
    for wrong in (text.replace("third", "gone"), text.replace("third`", "third` 1, `b.py:second`")):
        with pytest.raises(ValueError, match=r"b\.py:(gone|second)"):
            with_numbers(wrong, baseline)
