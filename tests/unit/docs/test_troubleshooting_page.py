"""Every message that docs/troubleshooting.md quotes is one of the server."""

import ast
import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loraplex.adapters.base_check import BaseCheck
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage
from loraplex.adapters.state_files import StateLock
from loraplex.adapters.tensor_file import StagingLimits
from loraplex.app.builder import served_shapes
from loraplex.app.plan import plan_memory
from loraplex.app.start_checks import check_start, check_weights_fit
from loraplex.cli.binding import refuse_if_open
from loraplex.core.config import AdapterConfig, Config, ModelConfig
from loraplex.core.devices import check_cuda
from loraplex.core.errors import LoraplexError
from loraplex.core.rank_limits import RankLimits
from loraplex.core.server_config import ServerConfig
from loraplex.demo import ADAPTER_PATHS, BASE_PATH
from loraplex.execution.weights.hub import resolve_model
from loraplex.execution.weights.stored_head import read_model
from loraplex.models.registry import read_config

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.compile(r"^```text\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
Change = Callable[[Path], None]


def quoted() -> list[str]:
    """Return the messages of the page; one may be broken over several lines."""
    blocks = QUOTED.findall(PAGE.read_text(encoding="utf-8"))
    return [" ".join(block.split()) for block in blocks]


def config(**changes: object) -> Change:
    """Return a function that changes the adapter's adapter_config.json."""

    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        values = json.loads(file.read_text(encoding="utf-8")) | changes
        file.write_text(json.dumps(values), encoding="utf-8")

    return change


def tensors(edit: Callable[[dict[str, np.ndarray]], None]) -> Change:
    """Return a function that changes the adapter's tensors, which become float32."""

    def change(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        found = {name: np.asarray(tensor) for name, tensor in load_file(file).items()}
        edit(found)
        save_file(found, file)

    return change


def only_config(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def only_weights(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()


def training_run(folder: Path) -> None:
    checkpoint = folder / "checkpoint-500"
    checkpoint.mkdir()
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        (folder / file).rename(checkpoint / file)


def pointer(folder: Path) -> None:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
    (folder / "adapter_model.safetensors").write_text(text, encoding="utf-8")


def truncated(folder: Path) -> None:
    file = folder / "adapter_model.safetensors"
    os.truncate(file, file.stat().st_size - 1000)


def not_a_number(found: dict[str, np.ndarray]) -> None:
    next(iter(found.values())).flat[0] = np.nan


def narrower(found: dict[str, np.ndarray]) -> None:
    for name, tensor in found.items():
        if name.endswith("layers.0.self_attn.q_proj.lora_A.weight"):
            found[name] = tensor[:, :128].copy()


def unknown_tensor(found: dict[str, np.ndarray]) -> None:
    for name in list(found):
        if ".layers.0.self_attn.q_proj." in name:
            found[name.replace("q_proj", "extra_proj")] = found[name]


def unknown_module(folder: Path) -> None:
    tensors(unknown_tensor)(folder)
    config(target_modules=["extra_proj", "k_proj", "q_proj", "v_proj"])(folder)


def fifth_layer(found: dict[str, np.ndarray]) -> None:
    for name in list(found):
        if ".layers.3." in name:
            found[name.replace(".layers.3.", ".layers.4.")] = found.pop(name)


def other_base(folder: Path) -> None:
    config(base_model_name_or_path="meta-llama/Llama-3.1-8B")(folder)


def narrower_of_other_base(folder: Path) -> None:
    tensors(narrower)(folder)
    other_base(folder)


def unchanged(folder: Path) -> None:
    """Leave the adapter as it is: the request is what refuses it."""


OWN_BASE = "loraplex/capitals/base"
OTHER_BASE = {"base_model": "Qwen/Qwen2.5-1.5B-Instruct"}
ADAPTERS: dict[str, tuple[Change, dict[str, Any]]] = {
    "training run": (training_run, {}),
    "no config": (only_weights, {}),
    "no weights": (only_config, {}),
    "git lfs": (pointer, {}),
    "truncated": (truncated, {}),
    "nan": (tensors(not_a_number), {}),
    "shape": (tensors(narrower), {}),
    "shape of another base": (narrower_of_other_base, OTHER_BASE),
    "another base": (other_base, {**OTHER_BASE, "base_check": BaseCheck.ERROR}),
    "layer": (tensors(fifth_layer), {}),
    "rank": (unchanged, {"limits": StagingLimits(max_ranks=RankLimits(4))}),
    "peft type": (config(peft_type="IA3"), {}),
    "pissa": (config(init_lora_weights="pissa"), {}),
    "unknown field": (config(new_feature=True), {}),
    "unknown module": (unknown_module, {}),
    "no target": (tensors(unknown_tensor), {}),
}
"""Changes of the shipped adapter, and of the request that loads it."""


@pytest.mark.parametrize("case", ADAPTERS)
def test_refused_adapters(case: str, tmp_path: Path) -> None:
    change, request = ADAPTERS[case]
    adapter = tmp_path / "legal"
    shutil.copytree(ADAPTER_PATHS["chinese"], adapter)
    change(adapter)
    usual = {"base_model": OWN_BASE, "pool_dtype": "bfloat16"}
    shapes = served_shapes(read_model(BASE_PATH), ModelConfig(path=str(BASE_PATH)))
    with pytest.raises(LoraplexError) as caught:
        stage(
            StageRequest(
                request_id=0,
                path=str(adapter),
                state_dir=str(tmp_path / "state"),
                shapes=shapes,
                **(usual | request),
            )
        )
    assert caught.value.message.replace(str(adapter), "/adapters/legal") in quoted()


def start(**server: object) -> Callable[[Path], None]:
    """Return a function that checks a start with settings of the server."""

    def check(folder: Path) -> None:
        ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
        settings = ServerConfig(**{"state_dir": str(folder / "state"), **ports, **server})
        check_start(Config(server=settings, models={"m": ModelConfig(path="/")}))

    return check


def missing_adapter(folder: Path) -> None:
    (folder / "legal").mkdir()
    adapters = {"legal": AdapterConfig(path=str(folder / "lega"))}
    model = ModelConfig(path="/", adapters=adapters)
    settings = ServerConfig(
        state_dir=str(folder / "state"), http_port=0, grpc_port=0, metrics_port=0
    )
    check_start(Config(server=settings, models={"m": model}))


def missing_model(folder: Path) -> None:
    (folder / "Llama-3.2-1B-Instruct").mkdir()
    resolve_model(str(folder / "Llama-3.2-1B-Instrukt"), None)


def plan(**settings: Any) -> Callable[[Path], object]:
    model = ModelConfig(path=str(BASE_PATH), device="cpu", **settings)
    return lambda folder: plan_memory(model, [])


CPU_BUILD = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"
CUDA_BUILD = "__version__ = '2.13.0'\ncuda: Optional[str] = '12.8'\n"
STARTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cpu build": (lambda folder: check_cuda("cuda", CPU_BUILD, has_gpu=True), ""),
    "no gpu": (lambda folder: check_cuda("cuda", CUDA_BUILD, has_gpu=False), ""),
    "missing adapter": (missing_adapter, "/adapters"),
    "missing model": (missing_model, "/models"),
    "open to others": (lambda folder: refuse_if_open(ServerConfig(host="0.0.0.0")), ""),
    "small pool": (plan(lora_device_bytes=1 << 20), ""),
    "weights": (lambda folder: weights_of_demo(4 << 20), ""),
}
"""Calls that refuse to start, and what the page writes for the test's folder."""


def weights_of_demo(memory_bytes: int) -> None:
    model = ModelConfig(path=str(BASE_PATH))
    check_weights_fit(model, read_config(BASE_PATH), memory_bytes)


@pytest.mark.parametrize("case", STARTS)
def test_refused_starts(case: str, tmp_path: Path) -> None:
    call, shown = STARTS[case]
    with pytest.raises(LoraplexError) as caught:
        call(tmp_path)
    message = caught.value.message
    assert (message.replace(str(tmp_path), shown) if shown else message) in quoted()


def test_a_port_in_use(tmp_path: Path) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(LoraplexError) as caught:
            start(http_port=port)(tmp_path)
    assert caught.value.message.replace(f":{port}:", ":8000:") in quoted()


def test_a_state_directory_in_use(tmp_path: Path) -> None:
    with contextlib.closing(StateLock.own(tmp_path)), pytest.raises(LoraplexError) as caught:
        start(state_dir=str(tmp_path))(tmp_path)
    message = caught.value.message.replace(str(tmp_path), "/var/lib/loraplex")
    assert message.replace(f"process {os.getpid()} ", "process 4711 ") in quoted()


SOURCES = {
    "meta-llama/Llama-3.2-1B-Instruct is": "execution/weights/hub.py",
    "the disk of the server": "adapters/durable_files.py",
    "/adapters/other is outside": "adapters/sources/policy.py",
    "adapters may not be loaded from": "adapters/sources/policy.py",
    "adapter 'legal' changes nothing": "serving/adapters/loading.py",
    "the adapter takes": "serving/served_model.py",
    "the adapter needs": "serving/served_model.py",
    "the device is out of memory": "execution/sizing/shortage.py",
    "no native CPU kernels": "kernels/dispatch.py",
    "no Triton": "kernels/dispatch.py",
    "there is no field": "frontends/openai/unsupported.py",
    "the prompt has": "serving/admission.py",
    "this server needs an API key": "frontends/access.py",
    "this server does not know": "serving/access/api_key_ring.py",
    "tenant 'acme' may not use": "serving/access/tenant_adapters.py",
    "there is no model or adapter": "serving/catalog.py",
    "64 requests wait": "scheduling/queues.py",
    "tenant 'acme' may send": "serving/access/tenant_limits.py",
    "the server is starting": "serving/service.py",
    "the engine is being started": "serving/engines/restart_limits.py",
    "the header Host": "frontends/middleware.py",
}
"""Beginnings of the messages that need a whole server, and the files with their texts."""


def patterns(file: str) -> Iterator[str]:
    """Yield a regular expression for each text of a file; its values may be anything."""
    for node in ast.walk(ast.parse((ROOT / "src/loraplex" / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.JoinedStr):
            texts = [part.value for part in node.values if isinstance(part, ast.Constant)]
            if len("".join(map(str, texts))) >= 20:
                yield "".join(
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".*"
                    for part in node.values
                )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield ".*".join(map(re.escape, re.split("%[drs]", node.value)))


@pytest.mark.parametrize("begin", SOURCES)
def test_messages_of_a_running_server(begin: str) -> None:
    [message] = [message for message in quoted() if message.startswith(begin)]
    assert any(re.fullmatch(pattern, message) for pattern in patterns(SOURCES[begin]))


TUTORIALS = {
    "... holds no adapter; supported: ...": "adapters/formats/inputs.py",
    "there is no model or adapter 'zz' here; there are: ...": "serving/catalog.py",
    "adapter 'zh' already exists (digest ...); remove it first, or replace it": "adapters/store.py",
    "the adapter belongs to another base model: ... (...)": "adapters/staging_worker.py",
    "... has rank 128; the server holds ranks up to 64 on ...: raise ...": "core/rank_limits.py",
    "... is an engine that TensorRT-LLM built, which only TensorRT can run; ...": (
        "compat/triton/trtllm.py"
    ),
    "LoRA task 7 not found in cache. Please send LoRA weights with request": (
        "frontends/kserve/errors.py"
    ),
    "unknown key; did you mean ...? Known: ...": "compat/llgtrt.py",
    "...: architecture 'rwkv7' of GGUF is not supported; supported: ...": "core/gguf_names.py",
    "... is a part of a model of 3 files, of which 1 are missing in its folder: ...": (
        "core/gguf.py"
    ),
    "left out adapter 'zh': ...": "serving/adapters/configured.py",
    "tensor ... needs LoRA of a convolution over positions (...), which is not served": (
        "adapters/formats/peft.py"
    ),
}
"""Messages that the tutorials quote, whole but for values (`...`), and the files with the texts."""


@pytest.mark.parametrize("message", TUTORIALS)
def test_messages_of_the_tutorials(message: str) -> None:
    assert any(re.fullmatch(pattern, message) for pattern in patterns(TUTORIALS[message]))


def test_every_message_of_the_tutorials_is_checked() -> None:
    """A code span of "When it goes wrong" is a message if it is first in its row or item."""
    found = set()
    for page in (ROOT / "docs" / "tutorials").glob("*.md"):
        section = page.read_text(encoding="utf-8").partition("\n## When it goes wrong\n")[2]
        section = section.partition("\n## ")[0]
        for row, item in re.findall(
            r"^(?:\| `([^`]+)` \||- \*\*`([^`]+)`\*\*)", section, re.MULTILINE
        ):
            found.add(row or item)
    assert found == set(TUTORIALS)


def test_every_quoted_message_is_checked() -> None:
    num_started = len(STARTS) + 2  # those with a port and a state directory of their own
    assert len(set(quoted())) == len(ADAPTERS) + num_started + len(SOURCES)
