"""`loraplex adapters` against a server that only echoes."""

import json
import re
import socket
import threading

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner

from loraplex.cli.adapters import _experts
from loraplex.cli.main import app
from loraplex.core.principal import LOCAL
from loraplex.frontends.openai import openai_fallback_routes, openai_routes
from support.echo_service import EchoService
from support.naming import naming
from support.served import served


@pytest.fixture
def backend():
    backend = EchoService()
    backend.register("org/fr", path="/adapters/fr", task_id=0)
    return backend


@pytest.fixture
def run(backend):
    """A function (*arguments) -> (exit code, standard output, standard error)."""
    http = Starlette()
    http.routes.extend(openai_routes(backend))
    http.routes.extend(openai_fallback_routes())
    with served(http) as url:

        def invoke(*arguments):
            result = CliRunner().invoke(app, ["adapters", *arguments, "--url", url])
            return result.exit_code, result.stdout, result.stderr

        yield invoke


def test_a_table_of_all(run, backend):
    digest = backend.adapters(LOCAL)[0].digest
    run("load", "org/fr", "/adapters/fr", "--replace")
    code, out, _ = run("list")
    head, row = out.splitlines()
    assert code == 0
    assert head.split()[:5] == ["NAME", "MODEL", "TASK", "VERSION", "DIGEST"]
    cells = ["org/fr", "echo", "0", "1", digest[:12], "8", "1", "KiB", "device", "ready"]
    assert row.split() == cells
    assert json.loads(run("list", "--json")[1])["data"][0]["digest"] == digest


def test_one_with_its_versions(run):
    run("load", "org/fr", "/new", "--replace")
    run("rollback", "org/fr")
    run("alias", "org/fr", "french")
    code, out, _ = run("show", "french")
    assert code == 0
    lines = [line.split(maxsplit=1) for line in out.splitlines() if line]
    assert ["aliases", "french"] in lines
    assert ["ranks", "q_proj 8"] in lines
    assert ["tensors", "2, F32 to float32"] in lines
    versions = out.split("SOURCE\n")[1].splitlines()
    assert [line.split()[0] for line in versions] == ["3", "2", "1"]
    assert versions[0].endswith("/adapters/fr (version 1 again)")


def test_experts_are_shown_by_layers():
    text = _experts(
        {
            "experts.down_proj": {"num_adapted": 1, "layers": {"3": "5"}},
            "experts.up_proj": {"num_adapted": 6018, "layers": {"0": "3,7", "1-47": "0-127"}},
        }
    )
    assert text == (
        "experts.down_proj 5 (layers 3), experts.up_proj 3,7 (layers 0), "
        "experts.up_proj 0-127 (layers 1-47)"
    )


def test_rounding_is_a_note_and_another_base_a_warning(run, backend):
    rounding = "tensors in F16 are rounded to the bfloat16 that this server computes in"
    backend.staging.remarks = (rounding, "it was trained on 'a/b'")
    run("load", "de", "/de")
    remarks = [line for line in run("show", "de")[1].splitlines() if "F16" in line or "a/b" in line]
    assert remarks == ["warning: it was trained on 'a/b'", f"note: {rounding}"]


def test_a_load_reports_what_it_loaded(run, backend):
    code, out, _ = run("load", "de", "/de", "--task-id", "7", "--canary")
    assert code == 0
    assert "canary   log probabilities differ by up to 0.5000" in out
    assert "device   2 KiB, 1 pages" in out
    assert "seconds  read 0.500" in out
    assert backend.adapters(LOCAL)[0].task_id == 7
    assert run("load", "de", "/de", "--replace")[1].startswith("unchanged: ")
    assert run("load", "x", "/x", "--dry-run")[1].startswith("nothing was loaded")
    assert "x" not in [card.name for card in backend.adapters(LOCAL)]


def test_unload_and_pins(run, backend, monkeypatch):
    modes, unload = [], backend.adapter_admin.unload

    async def noted(principal, ref, mode):
        modes.append(mode)
        return await unload(principal, ref, mode)

    monkeypatch.setattr(backend.adapter_admin, "unload", noted)
    assert run("pin", "org/fr") == (0, "version 1 of org/fr is pinned\n", "")
    assert run("unpin", "org/fr", "--version", "1")[1] == "version 1 of org/fr is not pinned\n"
    assert run("alias", "org/fr", "live")[1] == "live means org/fr now\n"
    assert run("unload", "live")[1] == "alias live is unloaded\n"
    assert run("unload", "org/fr", "--immediate")[1] == "adapter org/fr is unloaded\n"
    assert modes == ["drain", "immediate"]
    assert backend.adapters(LOCAL) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["show", "no"], ("no",)),
        (["load", "org/fr", "/x"], ("org/fr",)),
        (["rollback", "org/fr", "--version", "9"], (9, 1, "org/fr")),
    ],
)
def test_what_the_server_refuses_is_one_line(run, arguments, named):
    code, out, err = run(*arguments)
    assert (code, out) == (1, "")
    assert err.startswith("loraplex: ")
    assert re.search(naming(*named), err)
    assert err.count("\n") == 1


def test_without_a_key_the_error_names_its_source():
    async def refuse(_request):
        error = {"code": "invalid_api_key", "message": "a key is needed"}
        return JSONResponse({"error": error}, 401)

    with served(Starlette(routes=[Route("/v1/adapters", refuse)])) as url:
        result = CliRunner().invoke(app, ["adapters", "list", "--url", url])
    assert result.exit_code == 1
    assert re.search(naming("LORAPLEX_API_KEY"), result.stderr)


def test_a_server_that_hangs_up_may_speak_tls():
    """A server with TLS does so when a client connects without."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def hang_up():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)

        thread = threading.Thread(target=hang_up)
        thread.start()
        result = CliRunner().invoke(app, ["adapters", "list", "--url", url])
        thread.join()
    assert result.exit_code == 1
    assert re.search(naming("TLS", "https://"), result.stderr)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("http://127.0.0.1:9", ("loraplex serve MODEL",)),
        ("localhost:8000", ("--url", "http://HOST:PORT", "localhost:8000")),
        ("ftp://x", ("--url", "http://HOST:PORT", "ftp://x")),
    ],
)
def test_a_server_that_is_not_there(url, named):
    result = CliRunner().invoke(app, ["adapters", "list", "--url", url])
    assert result.exit_code == 1
    assert re.search(naming(*named), result.stderr)
