"""Fills a decoder's parameters from a Hugging Face folder, one tensor at a time.

Reads safetensors, and `.bin` files with torch's restricted unpickler only. Every tensor must be
accounted for: one that is missing, unknown, twice there or of another shape is an error.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from loraplex.core.errors import ConfigError
from loraplex.models.config import DecoderConfig
from loraplex.models.config_fields import read_fields
from loraplex.models.parameters import DecoderParameters, checkpoint_tensors

_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def load_parameters(folder: Path, parameters: DecoderParameters, config: DecoderConfig) -> None:
    """Copy the checkpoint into the parameters, in their dtype. Raises ConfigError."""
    places = checkpoint_tensors(parameters, config)
    filled: set[str] = set()
    # disable=None: only where a person watches.
    with tqdm(total=len(places), desc="Loading weights", unit="tensor", disable=None) as progress:
        for path in weight_files(folder):
            for name, tensor in _tensors(path):
                if _is_redundant(name, config):
                    continue
                _fill(name, tensor, places, filled, path)
                progress.update()
    missing = sorted(places.keys() - filled)
    if missing:
        raise ConfigError(
            f"{folder} lacks {len(missing)} weights of {config.architecture}, "
            f"the first of them {missing[0]}"
        )


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, safetensors before `.bin`."""
    for stem in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            return _shards(folder, index)
        if (folder / stem).is_file():
            return [folder / stem]
    raise ConfigError(
        f"{folder} has no weights: none of model.safetensors, model.safetensors.index.json, "
        "pytorch_model.bin and pytorch_model.bin.index.json is there"
    )


def _shards(folder: Path, index: Path) -> list[Path]:
    weight_map = read_fields(index).table("weight_map")
    if weight_map is None:
        raise ConfigError(f"{index}: weight_map is missing")
    names = sorted({weight_map.text(name, "") for name in weight_map})
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ConfigError(f"{index} names {name!r}, which is no file of the folder")
    return [folder / name for name in names]


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        yield from _safetensors(path) if path.suffix == ".safetensors" else _pickled(path)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118 - it is no mapping
            yield name, tensors.get_tensor(name)


def _pickled(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        raise ConfigError(
            f"cannot read {path}: it must be a plain state dict in torch's zip format "
            f"({type(error).__name__})"
        ) from error
    if not isinstance(tensors, dict):
        raise ConfigError(f"{path} holds no state dict")
    yield from tensors.items()


def _is_redundant(name: str, config: DecoderConfig) -> bool:
    """Old checkpoints stored the rotary frequencies; tied ones may store the embedding twice."""
    tied = config.tie_word_embeddings and name == "lm_head.weight"
    return tied or name.endswith("rotary_emb.inv_freq")


def _fill(
    name: str,
    tensor: torch.Tensor,
    places: Mapping[str, torch.Tensor],
    filled: set[str],
    path: Path,
) -> None:
    place = places.get(name)
    if place is None:
        raise ConfigError(f"{path}: unknown weight {name}; config.json does not account for it")
    if name in filled:
        raise ConfigError(f"{path}: weight {name} is there twice")
    if tensor.shape != place.shape:
        raise ConfigError(
            f"{path}: {name} has shape {list(tensor.shape)}, config.json means {list(place.shape)}"
        )
    if tensor.dtype not in _FLOATS:
        raise ConfigError(f"{path}: {name} is {tensor.dtype}; floating-point weights are supported")
    place.copy_(tensor)
    filled.add(name)
