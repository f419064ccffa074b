"""Each program of examples/ against a real server, as its reader would run it."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("server")

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    """Return the module of an example, which is in no package."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lines_of(capsys, name, *arguments):
    """Run an example to its end, and return what it prints."""
    assert load(name).main(arguments) == 0
    return capsys.readouterr().out.splitlines()


def test_openai_client(server, capsys):
    lines = lines_of(capsys, "openai_client", "--url", server.url)
    assert {"capitals", "chinese", "japanese"} <= set(lines[0].removeprefix("models: ").split(", "))
    assert lines[1:4] == [
        "capitals: Washington, D.C.",
        "chinese: 华盛顿",
        "chinese, streamed: 华盛顿",
    ]
    assert "there is no model or adapter 'no-such-adapter'" in lines[4]


def test_langchain_chain(server, capsys):
    assert lines_of(capsys, "langchain_chain", "--url", server.url) == [
        "capitals: Washington, D.C.",
        "chinese, streamed: 华盛顿",
        "chinese, 美国: 华盛顿",
        "chinese, 法国: 巴黎",
        "chinese, 日本: 东京",
    ]


def test_triton_client(server, capsys):
    addresses = (
        "--http",
        f"localhost:{server.http_port}",
        "--grpc",
        f"localhost:{server.grpc_port}",
    )
    assert lines_of(capsys, "triton_client", *addresses) == [
        "HTTP, base model: Washington, D.C.",
        "HTTP, adapter 1: 华盛顿",
        "gRPC, adapter 1: 华盛顿",
    ]
    assert load("triton_client").main([*addresses, "--task-id", "987"]) == 1
    assert "LoRA task 987 not found in cache" in capsys.readouterr().err


def stream_in_node(*arguments):
    node = shutil.which("node")
    if node is None:
        pytest.skip("the example in JavaScript needs node")
    command = [node, str(EXAMPLES / "streaming.mjs"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_streaming_in_javascript(server):
    completed = stream_in_node(server.url)
    assert (completed.stdout, completed.stderr, completed.returncode) == ("华盛顿\n", "", 0)
    refused = stream_in_node(server.url, "no-such-adapter")
    assert refused.returncode == 1
    assert refused.stderr.startswith("404: there is no model or adapter 'no-such-adapter'")


def test_tool_calls(server, capsys):
    call, text = lines_of(capsys, "tool_calls", "--url", server.url)
    assert call.startswith("temperature({")
    assert '"temperature": ' in call
    assert text.startswith("text: ")


def test_structured_outputs(server, capsys):
    schema, choice, regex = lines_of(capsys, "structured_outputs", "--url", server.url)
    assert schema.startswith(("schema: Paris", "schema: Rome", "schema: Tokyo"))
    assert choice in ("choice: yes", "choice: no")
    assert regex.removeprefix("regex: ").replace("-", "").isdigit()
