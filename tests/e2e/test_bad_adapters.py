"""Adapters that cannot be served: each gets one clear error, and the server continues."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from loraplex.demo import ADAPTER_PATHS

pytestmark = pytest.mark.xdist_group("server")

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def change_weights(folder: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name: change(name, value) for name, value in tensors.items()}, folder / WEIGHTS)


def cut_file(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def remove_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def other_base(folder: Path) -> None:
    change_weights(folder, lambda name, v: v[:, :-8] if "lora_A" in name else v)


def large_rank(folder: Path) -> None:
    change_config(folder, r=65)

    def widen(name: str, value: np.ndarray) -> np.ndarray:
        shape = (65, value.shape[1]) if "lora_A" in name else (value.shape[0], 65)
        return np.ones(shape, value.dtype)

    change_weights(folder, widen)


def not_a_number(folder: Path) -> None:
    change_weights(folder, lambda name, v: np.full_like(v, np.nan) if "k_proj" in name else v)


def untrained(folder: Path) -> None:
    change_weights(folder, lambda name, v: np.zeros_like(v) if "lora_B" in name else v)


def foreign_tensor(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file(
        tensors | {"base_model.model.score.weight": np.ones((2, 2), np.float32)}, folder / WEIGHTS
    )


def copy_of_a_norm(folder: Path) -> None:
    change_config(folder, modules_to_save=["input_layernorm"])
    tensors = load_file(folder / WEIGHTS)
    name = next(name for name in tensors if "lora_A" in name)
    layer = name[: name.index(".self_attn")]
    copy = np.ones(tensors[name].shape[1], np.float32)
    save_file(tensors | {f"{layer}.input_layernorm.weight": copy}, folder / WEIGHTS)


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'true'\ntR.")


CASES: dict[str, tuple[Callable[[Path], object], int, str, str]] = {
    "cut file": (cut_file, 422, "invalid_adapter", WEIGHTS),
    "no weights": (remove_weights, 422, "invalid_adapter", "adapter_model"),
    "another base": (other_base, 422, "adapter_mismatch", "lora_A"),
    "rank too large": (large_rank, 422, "adapter_too_large", "65"),
    "not a number": (not_a_number, 422, "invalid_adapter", "k_proj"),
    "untrained": (untrained, 422, "invalid_adapter", "changes nothing"),
    "foreign tensor": (foreign_tensor, 422, "invalid_adapter", "score.weight"),
    "pickled": (pickled, 422, "invalid_adapter", "adapter_model.bin"),
    "DoRA without magnitudes": (
        lambda f: change_config(f, use_dora=True),
        422,
        "invalid_adapter",
        "use_dora",
    ),
    "a changed base": (
        lambda f: change_config(f, init_lora_weights="pissa"),
        400,
        "unsupported_feature",
        "pissa",
    ),
    "a copy of a norm": (copy_of_a_norm, 400, "unsupported_feature", "layernorm"),
    "no LoRA": (lambda f: change_config(f, peft_type="IA3"), 400, "unsupported_feature", "IA3"),
    "config is no JSON": (
        lambda f: (f / CONFIG).write_text("{"),
        422,
        "invalid_adapter",
        CONFIG,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_bad_adapter_is_refused_and_named(server, tmp_path, name):
    spoil, status, code, fragment = CASES[name]
    folder = tmp_path / "adapter"
    shutil.copytree(ADAPTER_PATHS["chinese"], folder)
    spoil(folder)
    received, body = server.post("/v1/adapters", {"name": "bad", "path": str(folder)})
    error = body["error"]
    assert (received, error["code"]) == (status, code), error
    assert fragment in error["message"]
    names = {entry["name"] for entry in json.loads(server.get("/v1/adapters")[1])["data"]}
    assert "bad" not in names
    assert names >= {"chinese", "japanese"}
    assert server.is_ready()


def test_a_missing_folder_is_named(server, tmp_path):
    path = str(tmp_path / "nowhere")
    status, body = server.post("/v1/adapters", {"name": "bad", "path": path})
    assert status == 422
    assert path in body["error"]["message"]


def test_new_weights_under_an_old_name_are_used_at_once(server, tmp_path):
    """The cached KV of the prompt under the old weights must not be used."""
    fields = {
        "model": "mine",
        "prompt": "France",
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }

    def load(adapter: str) -> tuple[int, dict]:
        body = {"name": "mine", "path": str(ADAPTER_PATHS[adapter]), "replace": True}
        return server.post("/v1/adapters", body)

    def complete(model: str) -> str:
        status, body = server.post(
            "/v1/completions", {**fields, "model": model, "prompt": "x" * 60}
        )
        assert status == 200, body
        return body["choices"][0]["text"]

    assert load("chinese")[0] in (200, 201)
    assert complete("mine") == complete("chinese") == complete("mine")
    assert load("japanese")[0] in (200, 201)
    assert complete("mine") == complete("japanese")
    assert complete("japanese") != complete("chinese")
    assert server.delete("/v1/adapters/mine") == 200
