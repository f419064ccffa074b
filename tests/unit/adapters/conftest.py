"""Small PEFT folders, written without PEFT."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.staged import StageRequest
from loraplex.adapters.staging_worker import stage

SHAPES = BaseShapes(
    num_layers=2, modules={"q_proj": (8, 12), "k_proj": (8, 4), "down_proj": (16, 8)}
)


@pytest.fixture
def shapes() -> BaseShapes:
    return SHAPES


class PeftFolder:
    """Holds a config and tensors until it is written; both may be changed before."""

    def __init__(self, path: Path, rank: int = 2, seed: int = 0) -> None:
        self.path = path
        targets = list(SHAPES.modules)
        self.config = {
            "peft_type": "LORA",
            "r": rank,
            "lora_alpha": 4,
            "target_modules": targets,
        }
        self.tensors: dict[str, np.ndarray] = {}
        rng = np.random.default_rng(seed)
        for layer in range(SHAPES.num_layers):
            for module, (num_in, num_out) in SHAPES.modules.items():
                name = self.name(layer, module)
                self.tensors[f"{name}.lora_A.weight"] = rng.normal(size=(rank, num_in)).astype("f4")
                self.tensors[f"{name}.lora_B.weight"] = rng.normal(size=(num_out, rank)).astype(
                    "f4"
                )

    @staticmethod
    def name(layer: int, module: str) -> str:
        parent = "mlp" if module == "down_proj" else "self_attn"
        return f"base_model.model.model.layers.{layer}.{parent}.{module}"

    def write(self) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, self.path / "adapter_model.safetensors")
        return self.path


@pytest.fixture
def peft_folder(tmp_path):
    """A function (name, rank, seed) -> PeftFolder that is not written yet."""

    def make(name: str = "adapter", **kwargs) -> PeftFolder:
        return PeftFolder(tmp_path / name, **kwargs)

    return make


@pytest.fixture
def staged(tmp_path, shapes):
    """A function (path, **fields of the request) that stages into tmp_path / "state"."""

    def run(path, **kwargs):
        fields = {"shapes": shapes} | kwargs
        state = str(tmp_path / "state")
        return stage(StageRequest(request_id=1, path=str(path), state_dir=state, **fields))

    return run


class LoraPair:
    """TensorRT-LLM's tensors of an adapter for SHAPES: q_proj, down_proj, k_proj."""

    CONFIG = np.array([[1, 0, 2], [6, 1, 3], [2, 1, 1]], "<i4")
    SIZES = (2 * (8 + 12), 3 * (16 + 8), 1 * (8 + 4))

    def weights(self, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng(seed)
        weights = np.zeros((3, max(self.SIZES)), "<f4")
        for row, size in zip(weights, self.SIZES, strict=True):
            row[:size] = rng.normal(size=size)
        return weights

    def write(
        self, folder: Path, weights=None, config=CONFIG, config_name="model.lora_config.npy"
    ) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "model.lora_weights.npy", self.weights() if weights is None else weights)
        np.save(folder / config_name, config)
        return folder


@pytest.fixture
def pair() -> LoraPair:
    return LoraPair()
