"""Each program of examples/ against a real server, as its reader would run it."""

import importlib.util
import itertools
import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from loraplex.demo import ADAPTER_PATHS, BASE_PATH

pytestmark = pytest.mark.xdist_group("server")

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = r"美国的首都在哪里? \n答案:"


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
    # TensorRT-LLM's text.
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


def batch_requests(path, num_requests):
    models = ("capitals", "chinese", "japanese")
    lines = [
        json.dumps(
            {
                "custom_id": f"r{number}",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": models[number % 3], "prompt": PROMPT, "max_tokens": 12}
                | {"temperature": 0},
            }
        )
        for number in range(num_requests)
    ]
    path.write_text("\n".join(lines) + "\n")
    return [f"r{number}" for number in range(num_requests)]


def ids_of(output):
    return [json.loads(line)["custom_id"] for line in output.read_text().splitlines()]


def test_a_batch_file_goes_on_after_an_interruption(server, capsys, tmp_path):
    source, output = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    ids = batch_requests(source, 12)
    arguments = (str(source), str(output), "--url", server.url, "--concurrency", "4")
    assert lines_of(capsys, "batch_file", *arguments) == ["12 requests were sent, 0 of them failed"]
    assert sorted(ids_of(output)) == sorted(ids)
    result = json.loads(output.read_text().splitlines()[0])
    assert result["response"]["status_code"] == 200
    assert result["response"]["body"]["choices"][0]["text"]

    # As after a kill: some results are missing, and the last line is cut off.
    lines = output.read_text().splitlines(keepends=True)
    output.write_text("".join(lines[:5]) + lines[5][:40])
    assert lines_of(capsys, "batch_file", *arguments) == [
        "5 requests have their results already",
        "7 requests were sent, 0 of them failed",
    ]
    assert output.read_text().startswith("".join(lines[:5]))
    assert sorted(ids_of(output)) == sorted(ids)


def test_a_batch_file_without_a_server(server, capsys, tmp_path, monkeypatch):
    source, output = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    example = load("batch_file")
    monkeypatch.setattr(example, "MAX_TRIES", 1)
    batch_requests(source, 1)
    with socket.socket() as bound:  # it does not listen, so connections are refused
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert example.main([str(source), str(output), "--url", url]) == 2
    assert "The same command goes on later" in capsys.readouterr().err
    assert output.read_text() == ""

    source.write_text(source.read_text().replace('"capitals"', '"no-such-model"'))
    assert example.main([str(source), str(output), "--url", server.url]) == 1
    assert json.loads(output.read_text())["response"]["status_code"] == 404


@pytest.mark.parametrize(
    ("line", "problem"),
    [('{"custom_id": "r0", "url": "/", "body": {}}', "'r0' occurs twice"), ("{}", "'custom_id'")],
)
def test_a_batch_file_with_a_bad_line(server, capfd, tmp_path, line, problem):
    source, output = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    batch_requests(source, 6)
    lines = source.read_text().splitlines()
    source.write_text("\n".join([*lines[:4], line, *lines[4:]]))
    arguments = [str(source), str(output), "--url", server.url, "--concurrency", "2"]
    assert load("batch_file").main(arguments) == 2
    (report,) = capfd.readouterr().err.splitlines()
    assert "requests.jsonl, line 5: " in report
    assert problem in report
    assert len(ids_of(output)) >= 3  # two are in flight at most

    source.write_text("\n".join(lines))
    assert load("batch_file").main(arguments) == 0
    assert sorted(ids_of(output)) == [f"r{number}" for number in range(6)]


@pytest.mark.slow  # transformers and peft take seconds to be imported, on a busy machine minutes
@pytest.mark.timeout(600)
def test_adapter_updates(server, capsys, tmp_path, monkeypatch):
    example = load("adapter_updates")
    arguments = ["--url", server.url, "--base", str(BASE_PATH), "--folder", str(tmp_path)]
    arguments += ["--adapter", "example-policy"]

    def served():
        status, text = server.get("/v1/adapters/example-policy")
        return json.loads(text) if status == 200 else None

    def completion(model):
        body = {"model": model, "prompt": example.PROMPTS, "max_tokens": 8, "temperature": 2}
        return server.post("/v1/completions", body | {"seed": 7})[1]["choices"]

    try:
        assert example.main([*arguments, "--rounds", "3"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(":")[0] for line in lines] == [f"round {n}" for n in range(1, 4)]
        assert any(line.endswith("kept") for line in lines)
        trained, outputs = served(), completion("example-policy")
        assert outputs != completion("capitals")

        # Another reward, which every new version earns less of: all of its rounds are undone.
        earned = itertools.count(0, -1)
        monkeypatch.setattr(example, "reward", lambda text: float(next(earned)))
        client = httpx.Client(base_url=server.url, timeout=60)
        with client:
            policy = example.Policy(client, "capitals", "example-policy")
            policy._digest = trained["digest"]
            example.train(policy, example.Trainer(BASE_PATH), tmp_path / "worse", 2)
        lines = capsys.readouterr().out.splitlines()
        assert [line.endswith("rolled back") for line in lines] == [True, True]
        assert served()["digest"] == trained["digest"]
        assert served()["version"] != trained["version"]
        assert completion("example-policy") == outputs
    finally:
        server.delete("/v1/adapters/example-policy")


@pytest.mark.slow  # an engine of its own
def test_fastapi_app(tmp_path, monkeypatch):
    from fastapi.testclient import TestClient

    for variable in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    adapters = {name: str(path) for name, path in ADAPTER_PATHS.items()}
    app = load("fastapi_app").create_app(str(BASE_PATH), adapters)
    with TestClient(app) as client:
        assert client.get("/adapters").json() == ["chinese", "japanese"]
        for adapter, text in ((None, "Washington, D.C."), ("chinese", "华盛顿")):
            body = {"prompt": PROMPT, "adapter": adapter}
            response = client.post("/completions", json=body)
            assert response.json()["text"].strip() == text
            assert response.json()["adapter"] == adapter
            assert client.post("/stream", json=body).text.strip() == text
        for route in ("/completions", "/stream"):
            unknown = client.post(route, json={"prompt": "Hello", "adapter": "nix"})
            assert unknown.status_code == 400
            assert "'nix'" in unknown.json()["detail"]
        assert client.post("/completions", json={"prompt": "x", "max_tokens": 0}).status_code == 422
