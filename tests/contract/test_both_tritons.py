"""Send the same calls to our server and to the real Triton 2.51 with our exported models.

Each server gets each call once. The responses are equal except for triton_differences.toml.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.both_tritons import (
    calls_errors,
    calls_generate,
    calls_lora,
    calls_models,
    calls_protocol,
    calls_streams,
    calls_vllm,
)
from support.both_tritons.calls import Call, by_name
from support.both_tritons.compared import (
    Difference,
    differing,
    read_differences,
    unlisted,
)
from support.both_tritons.responses import Response
from support.both_tritons.servers import Pair, Repository, both_serving
from support.real_triton import MISSING, tritonserver

PROGRAM = tritonserver(Path(__file__).parents[2])
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason=MISSING),
    pytest.mark.xdist_group("both_tritons"),
    pytest.mark.timeout(600),
]

FILES = (
    *(calls_models, calls_lora, calls_streams, calls_generate),
    *(calls_vllm, calls_errors, calls_protocol),
)
CALLS = by_name(*(file.CALLS for file in FILES))
DIFFERENCES = read_differences(Path(__file__).with_name("triton_differences.toml"))

ResponsesOf = Callable[[Call], tuple[Response, Response]]


@pytest.fixture(scope="module")
def responses_of(tmp_path_factory) -> Iterator[ResponsesOf]:
    """Return a function from a call to (our response, the real Triton's); each is sent once."""
    with ExitStack() as stack:

        @functools.cache
        def pair(repository: Repository) -> Pair:
            folder = tmp_path_factory.mktemp(repository.value)
            assert PROGRAM is not None
            return stack.enter_context(both_serving(PROGRAM, repository, folder))

        @functools.cache
        def responses(name: str) -> tuple[Response, Response]:
            call = CALLS[name]
            servers = pair(call.repository)
            return call.run(servers.ours), call.run(servers.real)

        yield lambda call: responses(call.name)


@pytest.mark.parametrize("name", CALLS)
def test_both_respond_alike(responses_of, name):
    ours, real = responses_of(CALLS[name])
    assert not unlisted(ours, real, name, DIFFERENCES), "(ours, the real one's) by field"


@pytest.mark.parametrize("row", DIFFERENCES, ids=lambda row: f"{row.calls[0]}, {row.field}")
def test_each_difference_is_there(responses_of, row: Difference):
    for pattern in row.calls:
        shown = [
            name for name in CALLS if row.is_of(name, pattern) and is_shown(responses_of, row, name)
        ]
        assert shown, f"no call like {pattern!r} shows it"


def is_shown(responses_of: ResponsesOf, row: Difference, name: str) -> bool:
    responses = responses_of(CALLS[name])
    return any(row.has(field, *texts) for field, texts in differing(*responses).items())


def test_a_difference_is_found():
    """Tests of the comparison itself."""
    ours, real = {"status": "OK", "error": "a: b"}, {"status": "OK", "error": "a"}
    assert differing(ours, real) == {}
    assert differing(ours, real | {"error": "b: a"}) == {"error": ("a: b", "b: a")}
    assert differing(ours, {"status": 400, "error": "x"}) == {"outcome": ("OK: a: b", "400: x")}
    row = Difference(("a *",), "sta*", "OK", "404", "so")
    assert unlisted({"status": 404}, {"status": 400}, "a call", [row])
    assert unlisted({"status": 200}, {"status": "OK"}, "another", [row])
