"""The files of a model folder: those with weights, and those about texts. Free of torch."""

from collections.abc import Iterator
from pathlib import Path

from loraplex.core.errors import ConfigError
from loraplex.models.config_fields import read_fields
from loraplex.models.engine_folder import CONFIG_NAME, WEIGHTS_NAME, is_foreign_checkpoint
from loraplex.models.gguf_config import gguf_of
from loraplex.models.sentence_transformers import vector_files
from loraplex.models.trtllm_checkpoint import read_mapping

_TEXT_FILES = (
    *("generation_config.json", "tokenizer*.json", "tokenizer*.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.*"),
    *("additional_chat_templates/*.jinja", "preprocessor*.json"),
)


def text_files(folder: Path) -> Iterator[Path]:
    """Yield the tokenizer's files, the chat template's, what ends a text, and those of vectors."""
    for pattern in _TEXT_FILES:
        yield from filter(Path.is_file, folder.glob(pattern))
    yield from vector_files(folder)


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights, safetensors before `.bin`."""
    if is_foreign_checkpoint(folder):
        return rank_files(folder)
    if gguf := gguf_of(folder):
        return gguf
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
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
            raise ConfigError(f"{index} names {name!r}, which is not a file of the folder")
    return [folder / name for name in names]


def rank_files(folder: Path) -> list[Path]:
    """One for each GPU that the checkpoint was split for. Raises ConfigError if one is missing."""
    tp_size, pp_size = read_mapping(read_fields(folder / CONFIG_NAME))
    files = [folder / f"rank{rank}.safetensors" for rank in range(tp_size * pp_size)]
    for file in files:
        if not file.is_file():
            raise ConfigError(
                f"{folder} has no {file.name}; by its {CONFIG_NAME} there are {len(files)} ranks"
            )
    return files
