"""llgtrt's own page on LoRA, followed: each of its shell blocks and both of its requests as they
stand there, with only the paths and the port replaced, and the cache that it describes.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load_file, save_file

from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.testing.running_server import RunningServer, running

pytestmark = pytest.mark.slow

COMPAT = Path(__file__).parents[2] / "compat"

BUILD = r"""
# Convert the HF model to a checkpoint
python3 /opt/TensorRT-LLM-examples/llama/convert_checkpoint.py \
    --dtype bfloat16 \
    --model_dir /models/Meta-Llama-3.1-8B-Instruct \
    --output_dir /models/model-ckpt \
    --tp_size 1

# Run trtllm build with LoRA enabled.  For this example we activate the attn_q, attn_k, and attn_v modules.
trtllm-build --checkpoint_dir /models/model-ckpt \
    --gemm_plugin bfloat16 \
    --output_dir /models/model-engine \
    --use_paged_context_fmha enable \
    --lora_plugin bfloat16 \
    --lora_dir /models/My-Finetuned-Meta-Llama-3.1-8B-Instruct \
    --lora_ckpt_source hf \
    --lora_target_modules attn_q attn_k attn_v

# Clean up checkpoint (optional)
rm -rf /models/model-ckpt

# Finally, copy tokenizer.json and tokenizer_config.json
cp /models/Meta-Llama-3.1-8B-Instruct/tokenizer.json /models/model-engine
cp /models/Meta-Llama-3.1-8B-Instruct/tokenizer_config.json /models/model-engine

# Exit the container
exit
"""  # noqa: E501
EXTRACT = r"""
# Ensure that a base LoRA directory exists
mkdir -p /models/lora

# Run the extraction
python3 /code/scripts/extract_lora.py -i /models/My-Finetuned-Meta-Llama-3.1-8B-Instruct -o /models/lora/my_finetuning.safetensors

exit
"""  # noqa: E501
EXTRACT_AS = r"""
python3 /code/scripts/extract_lora.py -i /models/My-Finetuned-Meta-Llama-3.1-8B-Instruct -o /models/lora/my_finetuning.safetensors -t bfloat16
"""  # noqa: E501
RUN = "PORT=3001 ./docker/run.sh /models/Meta-Llama-3.1-8B-Instruct models/lora"

FIRST_USE = """
{
    "model": "llama",
    "messages": [
        {
            "role": "user",
            "content": "What is the meaning of life?"
        }
    ],
    "lora_model": "my_finetuning"
}
"""
NEVER = """
{
    "model": "llama",
    "messages": [
        {
            "role": "user",
            "content": "What is the meaning of life?"
        }
    ],
    "lora_model": "my_finetuning",
    "load_lora_weights": "never"
}
"""
NOT_CACHED = "was not in cache and load_lora_weights is set to never"
FRANCE = "What is the capital of France?"


@dataclasses.dataclass(frozen=True)
class Machine:
    """What the page takes for granted: /models, /code, /opt and the working directory."""

    root: Path

    @property
    def models(self) -> Path:
        return self.root / "models"

    def with_paths(self, block: str) -> str:
        places = {
            "/opt/TensorRT-LLM-examples": COMPAT / "opt" / "TensorRT-LLM-examples",
            "/code": COMPAT / "code",
            "./docker": COMPAT / "llgtrt" / "docker",
            "/models/": f"{self.models}/",
        }
        for path, place in places.items():
            block = block.replace(path, str(place))
        return block

    def environment(self, **settings: str) -> dict[str, str]:
        own_python = Path(sys.executable).parent
        path = f"{COMPAT / 'bin'}:{own_python}:{os.environ['PATH']}"
        return os.environ | {"PATH": path} | settings

    def replay(self, block: str) -> str:
        done = subprocess.run(
            ["bash", "-e", "-c", self.with_paths(block)],
            env=self.environment(),
            cwd=self.root,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def shell(self, line: str, **settings: str) -> list[str]:
        """Run a serving line on a free port and local address; stopping it stops the server."""
        variables = settings | {
            "LORAPLEX_HOST": "127.0.0.1",
            "LORAPLEX_STATE_DIR": str(self.root / "state"),
            "PATH": self.environment()["PATH"],
        }
        assignments = " ".join(f"{name}={value}" for name, value in variables.items())
        words = self.with_paths(line).replace("PORT=3001", "exec env PORT=0")
        return ["bash", "-c", f"cd {self.root}; export {assignments}; {words}"]

    @contextlib.contextmanager
    def serving(self, line: str, **settings: str) -> Iterator[RunningServer]:
        with running(self.shell(line, **settings), last_port="http_port") as server:
            yield server


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    models = tmp_path / "models"
    models.mkdir()
    shutil.copytree(BASE_PATH, models / "Meta-Llama-3.1-8B-Instruct")
    shutil.copytree(ADAPTER_PATHS["chinese"], models / "My-Finetuned-Meta-Llama-3.1-8B-Instruct")
    return Machine(tmp_path)


def complete(server: RunningServer, body: str, **fields: Any) -> tuple[int, Any]:
    return server.post("/v1/chat/completions", json.loads(body) | fields)


def capital(server: RunningServer, **fields: Any) -> str:
    messages = [{"role": "user", "content": FRANCE}]
    status, response = complete(server, FIRST_USE, messages=messages, temperature=0, **fields)
    assert status == 200, response
    return str(response["choices"][0]["message"]["content"])


def load_seconds(server: RunningServer, **fields: Any) -> float:
    """Return the seconds of reading adapters for one request."""
    status, response = complete(server, FIRST_USE, **fields)
    assert status == 200, response
    return float(response["loraplex"]["timing"][0]["adapter_load_seconds"])


def test_the_page_from_the_first_line_to_the_last(machine: Machine) -> None:
    machine.replay(BUILD)
    assert (machine.models / "model-engine" / "rank0.engine").is_file()
    assert not (machine.models / "model-ckpt").exists()
    machine.replay(EXTRACT)
    written = (machine.models / "lora" / "my_finetuning.safetensors").read_bytes()
    machine.replay(EXTRACT_AS)
    assert (machine.models / "lora" / "my_finetuning.safetensors").read_bytes() != written

    with machine.serving(RUN) as server:
        status, response = complete(server, FIRST_USE)
        assert (status, response["model"]) == (200, "llama")
        [used] = response["loraplex"]["adapters"]
        assert used["name"] == "my_finetuning"
        # It is cached now, so `never` is no error, and the weights are the same.
        status, again = complete(server, NEVER)
        assert status == 200
        assert again["loraplex"]["adapters"] == [used]
        assert capital(server) == "巴黎"
        assert capital(server, lora_model=None) == "Paris"
    # The engine that was built responds alike.
    built = RUN.replace("Meta-Llama-3.1-8B-Instruct", "model-engine")
    with machine.serving(built) as server:
        assert capital(server) == "巴黎"
        assert capital(server, lora_model=None) == "Paris"


def extract(machine: Machine, adapter: str, name: str) -> None:
    given = machine.models / "given"
    shutil.copytree(ADAPTER_PATHS[adapter], given)
    (machine.models / "lora" / name).parent.mkdir(exist_ok=True)
    machine.replay(f"python3 /code/scripts/extract_lora.py -i /models/given -o /models/lora/{name}")
    shutil.rmtree(given)


def double(machine: Machine, source: str, target: str) -> None:
    """Another adapter of the same size."""
    lora = machine.models / "lora"
    tensors = load_file(lora / source)
    save_file(tensors | {"weights": tensors["weights"] * 2}, lora / target)


SMALL = {
    "LORAPLEX_MAX_LORA_RANK": "8",
    "LORAPLEX_LORA_DEVICE_BYTES": "264192",
    "LORAPLEX_LORA_HOST_BYTES": "120000",
    "LORAPLEX_ADAPTER_WATCH_SECONDS": "0",
}
"""Configuration in which two adapters fit, and only a request's option rereads their files."""


def test_the_cache_that_the_page_describes(machine: Machine) -> None:
    machine.replay(EXTRACT)
    with machine.serving(RUN, **SMALL) as server:
        assert capital(server) == "巴黎"
        # Others come while it serves: no restart. Two fit.
        extract(machine, "japanese", "team/other.v2.safetensors")
        assert capital(server, lora_model="team/other.v2") == "パリ"
        double(machine, "team/other.v2.safetensors", "third.safetensors")
        assert capital(server, lora_model="third")
        # The first one was evicted: `never` is an error, auto reloads it.
        status, error = complete(server, NEVER)
        assert status == 404
        assert NOT_CACHED in error["error"]["message"]
        assert load_seconds(server) > 0
        assert load_seconds(server) == 0
        assert capital(server) == "巴黎"
        assert complete(server, NEVER)[0] == 200
        # A changed file is not read again until a request sends "always".
        extract(machine, "japanese", "my_finetuning.safetensors")
        assert capital(server) == "巴黎"
        assert capital(server, load_lora_weights="always") == "パリ"
        assert capital(server) == "パリ"
        status, error = complete(server, FIRST_USE, lora_model="../My-Finetuned")
        assert status == 400
        # llgtrt's text.
        assert "outside the LoRA base directory" in error["error"]["message"]


def test_the_key_of_the_original_is_required_everywhere(machine: Machine) -> None:
    line = f"{RUN.removesuffix(' models/lora')} --api-key secret-of-the-test -q --llgtrt-compat"
    headers = {"Authorization": "Bearer secret-of-the-test"}
    with machine.serving(line) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        for path in ("/v1/health/live", "/v1/health/ready", "/v1/health/model", "/health/ready"):
            refused = client.get(path)
            assert (refused.status_code, refused.content) == (401, b"")
            assert client.get(path, headers=headers).status_code == 200
        body = json.loads(FIRST_USE) | {"lora_model": None}
        response = client.post("/v1/chat/completions", json=body, headers=headers).json()
        assert response["object"] == "text_completion"
        assert response["usage"]["completion_tokens"] <= 16
        lost = client.post("/v1/chat/completions", json=json.loads(FIRST_USE), headers=headers)
        assert lost.status_code == 500
        # llgtrt's text.
        assert lost.json()["error"].startswith("lora_model specified but lora_root not set")
