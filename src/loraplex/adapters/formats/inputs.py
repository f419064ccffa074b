"""Detection of an adapter's format, and reading of its rows.

`open_input` chooses the class of the format. No other module of the package knows all formats.
"""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from loraplex.adapters.canonical import FORMAT, CanonicalRow, parse_canonical
from loraplex.adapters.formats import canonical_file, mlx, peft, torch_bin, trtllm
from loraplex.adapters.formats.gguf_lora import GgufLora, read_gguf_lora
from loraplex.adapters.formats.peft_config import CONFIG_NAME, PeftConfig, read_config
from loraplex.adapters.formats.peft_coverage import target_warnings
from loraplex.adapters.formats.peft_ends import EndTokens, read_end_tokens, read_prompts
from loraplex.adapters.formats.peft_names import is_of_other_tower, is_unread
from loraplex.adapters.fused_modules import fit_modules
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.tensor_file import (
    RawTensor,
    StagingLimits,
    read_bounded,
    read_tensors,
)
from loraplex.core.byte_sizes import readable_bytes
from loraplex.core.counts import counted
from loraplex.core.errors import AdapterTooLargeError, InvalidAdapterError, LoraplexError
from loraplex.core.vector_format import TextPrompts

FILE_SUFFIX = ".safetensors"
GGUF_SUFFIX = ".gguf"
_MAX_ENTRIES = 1000
"""Maximum number of entries of a folder that are looked at for a hint."""
UNDERSTOOD = (
    f"a PEFT folder ({CONFIG_NAME} and {peft.WEIGHTS_NAME} or {peft.TORCH_WEIGHTS_NAME}), "
    f"an MLX folder ({CONFIG_NAME} and {mlx.WEIGHTS_NAME}), "
    f"a TensorRT-LLM folder ({trtllm.WEIGHTS_NAME} and {' or '.join(trtllm.CONFIG_NAMES)}), "
    f"a {FILE_SUFFIX} file with the tensors weights and config, a canonical adapter file of "
    f"loraplex, or a {GGUF_SUFFIX} file of LoRA"
)


class AdapterInput:
    """Adapter that has not been read yet. Each format has a class."""

    format: str
    left_out: Sequence[str] = ()
    """Names of the tensors, of those read, that no output depends on."""
    end_tokens = EndTokens()
    """End tokens that its files name."""
    prompts: TextPrompts | None = None
    """Prompts that its files have."""
    trained_on: str | None = None
    """Name of the base model that it was trained on, if its files have it."""

    def read_rows(self, shapes: BaseShapes, limits: StagingLimits) -> tuple[CanonicalRow, ...]:
        raise NotImplementedError

    def warnings(self, rows: tuple[CanonicalRow, ...], shapes: BaseShapes) -> list[str]:
        """Return warnings; shapes are of the base."""
        del rows, shapes
        return []


class PeftFolder(AdapterInput):
    """PEFT folder: adapter_config.json and adapter_model.safetensors or .bin."""

    format = "PEFT"

    def __init__(self, folder: Path, limits: StagingLimits) -> None:
        self.config: PeftConfig = read_config(folder, limits.max_header_bytes)
        self.trained_on = self.config.base_model_name_or_path
        weights = next((n for n in peft.WEIGHTS_NAMES if (folder / n).exists()), None)
        if weights is None:
            raise InvalidAdapterError(f"{folder} has neither {' nor '.join(peft.WEIGHTS_NAMES)}")
        self._weights = folder / weights
        self.files = (folder / CONFIG_NAME, self._weights)
        self.end_tokens, self._unread = read_end_tokens(folder, limits.max_header_bytes)
        self.prompts, unread = read_prompts(folder, limits.max_header_bytes)
        self._unread += unread
        self._other_towers: list[str] = []
        self._unread_layers: list[str] = []

    def read_tensors(self, limits: StagingLimits) -> dict[str, RawTensor]:
        """Read the tensors by their names in the file."""
        if self._weights.name == peft.TORCH_WEIGHTS_NAME:
            return torch_bin.read_torch_file(self._weights, limits)
        return read_tensors(self._weights, limits).tensors

    def read_rows(self, shapes: BaseShapes, limits: StagingLimits) -> tuple[CanonicalRow, ...]:
        tensors = self.read_tensors(limits)
        self._unread_layers = [name for name in tensors if is_unread(name, shapes)]
        self._other_towers = list(filter(is_of_other_tower, tensors))
        self.left_out = (*self._other_towers, *self._unread_layers)
        kept = {name: tensor for name, tensor in tensors.items() if name not in self.left_out}
        rows = peft.canonical_rows(self.config, kept, shapes)
        num_bytes = sum(row.num_bytes for row in rows)
        if num_bytes > limits.max_file_bytes:
            raise AdapterTooLargeError(
                f"{self._weights} has {readable_bytes(num_bytes)} once the factors that experts "
                f"share are repeated for each of them; at most "
                f"{readable_bytes(limits.max_file_bytes)} are allowed (max_adapter_bytes)"
            )
        return rows

    def warnings(self, rows: tuple[CanonicalRow, ...], shapes: BaseShapes) -> list[str]:
        warnings = target_warnings(self.config, rows, shapes) + self._unread
        if self._other_towers:
            warnings.append(
                f"{counted(len(self._other_towers), 'tensor')} of a part that no text passes "
                "through (of images, sound or draft tokens), such as "
                f"{self._other_towers[0]!r}: left out"
            )
        if self._unread_layers:
            warnings.append(
                f"{counted(len(self._unread_layers), 'tensor')} of layers that read the keys and "
                f"values of others, such as {self._unread_layers[0]!r}: left out"
            )
        return warnings


class MlxFolder(AdapterInput):
    """Folder of mlx-lm: adapter_config.json and adapters.safetensors."""

    format = "MLX"

    def __init__(self, folder: Path, limits: StagingLimits) -> None:
        config = folder / CONFIG_NAME
        self._weights = folder / mlx.WEIGHTS_NAME
        try:
            self._config = mlx.parse_config(bytes(read_bounded(config, limits.max_header_bytes)))
        except LoraplexError as error:
            raise type(error)(f"{config}: {error.message}") from error
        self.trained_on = self._config.model

    def read_rows(self, shapes: BaseShapes, limits: StagingLimits) -> tuple[CanonicalRow, ...]:
        tensors = mlx.peft_tensors(
            read_tensors(self._weights, limits).tensors, ties_embeddings=shapes.ties_embeddings
        )
        return peft.canonical_rows(self._config.as_peft, tensors, shapes)


class PairFolder(AdapterInput):
    """TensorRT-LLM folder with two .npy files."""

    format = "TensorRT-LLM"

    def __init__(self, folder: Path) -> None:
        config = trtllm.config_file(folder)
        if config is None:
            raise InvalidAdapterError(
                f"{folder} has {trtllm.WEIGHTS_NAME}, but neither "
                f"{' nor '.join(trtllm.CONFIG_NAMES)}"
            )
        self._folder, self._config = folder, config

    def read_pair(self, limits: StagingLimits) -> tuple[RawTensor, RawTensor]:
        """Read (lora_weights, lora_config)."""
        return trtllm.read_pair(self._folder, self._config, limits.max_file_bytes)

    def read_rows(self, shapes: BaseShapes, limits: StagingLimits) -> tuple[CanonicalRow, ...]:
        return _rows_of_pair(str(self._folder), *self.read_pair(limits), shapes, limits)


class LoraFile(AdapterInput):
    """Single .safetensors file: llgtrt's, or a canonical adapter file."""

    format = "safetensors"

    def __init__(self, path: Path) -> None:
        self._path = path

    def read_pair(self, limits: StagingLimits) -> tuple[RawTensor, RawTensor] | None:
        """Read (lora_weights, lora_config) of llgtrt's file; None: it is another."""
        return trtllm.pair_of(read_tensors(self._path, limits))

    def read_rows(self, shapes: BaseShapes, limits: StagingLimits) -> tuple[CanonicalRow, ...]:
        content = read_tensors(self._path, limits)
        if content.metadata.get("format") == FORMAT:
            return canonical_file.check_rows(parse_canonical(self._path, content).rows)
        pair = trtllm.pair_of(content)
        if pair is not None:
            return _rows_of_pair(str(self._path), *pair, shapes, limits)
        raise InvalidAdapterError(
            f"{self._path} holds {_listed(content.tensors)}; supported: {UNDERSTOOD}"
        )


class GgufLoraFile(AdapterInput):
    """GGUF file of an adapter."""

    format = "GGUF"

    def __init__(self, path: Path, limits: StagingLimits) -> None:
        self.lora: GgufLora = read_gguf_lora(path, limits)
        self.trained_on = self.lora.trained_on

    def read_rows(self, shapes: BaseShapes, limits: StagingLimits) -> tuple[CanonicalRow, ...]:
        del limits  # the file was read when it was opened
        return self.lora.rows(shapes)

    def warnings(self, rows: tuple[CanonicalRow, ...], shapes: BaseShapes) -> list[str]:
        del shapes
        scales = ", ".join(f"{scale:g}" for scale in sorted({row.scale for row in rows}))
        return [
            f"it is a GGUF file, which has one alpha ({self.lora.alpha:g}) and not whether PEFT's "
            "use_rslora or alpha_pattern were set: they would be lost. LoRA is multiplied by "
            f"{scales} (alpha / rank); if that is wrong, load the PEFT folder",
        ]


class RequestTensors(AdapterInput):
    """Tensors lora_weights and lora_config of a request."""

    format = "TensorRT-LLM"

    def __init__(self, weights: RawTensor, config: RawTensor) -> None:
        self._weights, self._config = weights, config

    def read_rows(self, shapes: BaseShapes, limits: StagingLimits) -> tuple[CanonicalRow, ...]:
        return trtllm.canonical_rows(self._weights, self._config, shapes, limits.max_ranks)


def read_fitting_rows(
    source: AdapterInput, shapes: BaseShapes, limits: StagingLimits
) -> tuple[CanonicalRow, ...]:
    """Read the rows as they fit the linear layers of a base model (fused_modules)."""
    return fit_modules(source.read_rows(shapes, limits), shapes)


def open_input(path: str, limits: StagingLimits) -> AdapterInput:
    """Open the adapter at a path. Raises InvalidAdapterError, which lists the known formats."""
    if not path or "\0" in path:
        raise InvalidAdapterError(
            "the path of an adapter must be that of a folder, or of a .safetensors or .gguf file"
        )
    try:
        try:
            place = Path(path).expanduser().resolve(strict=True)
        except RuntimeError as error:  # a link to itself
            raise InvalidAdapterError(f"cannot open the adapter {path}: {error}") from error
        return _input_at(place, path, limits)
    except OSError as error:
        raise InvalidAdapterError(f"cannot open the adapter {path}: {error.strerror}") from error


def _input_at(place: Path, path: str, limits: StagingLimits) -> AdapterInput:
    """Open the adapter at a resolved path."""
    if not place.is_dir():
        if place.name.endswith(FILE_SUFFIX):
            return LoraFile(place)
        if place.name.endswith(GGUF_SUFFIX):
            return GgufLoraFile(place, limits)
        raise InvalidAdapterError(f"{path} is not an adapter; supported: {UNDERSTOOD}")
    has_peft_weights = any((place / name).exists() for name in peft.WEIGHTS_NAMES)
    if not has_peft_weights and (place / mlx.WEIGHTS_NAME).exists():
        return MlxFolder(place, limits)
    if has_peft_weights or (place / CONFIG_NAME).exists():
        return PeftFolder(place, limits)
    if (place / trtllm.WEIGHTS_NAME).exists():
        return PairFolder(place)
    gguf_files = sorted(path for path in place.iterdir() if path.name.endswith(GGUF_SUFFIX))
    if len(gguf_files) > 1:
        raise InvalidAdapterError(
            f"{path} has several {GGUF_SUFFIX} files, such as {gguf_files[0].name} and "
            f"{gguf_files[1].name}: give the path of one of them"
        )
    if gguf_files:
        return GgufLoraFile(gguf_files[0], limits)
    raise InvalidAdapterError(f"{path} holds no adapter{_hint(place)}; supported: {UNDERSTOOD}")


def _hint(folder: Path) -> str:
    """Return where the adapters of a training run are: in folders such as checkpoint-500."""
    entries = itertools.islice(folder.iterdir(), _MAX_ENTRIES)
    names = [entry.name for entry in entries if (entry / CONFIG_NAME).is_file()]
    if not names:
        return ""
    # checkpoint-1000 is after checkpoint-500.
    newest = max(names, key=lambda name: (len(name), name))
    others = f", or {counted(len(names) - 1, 'other folder')} in it" if len(names) > 1 else ""
    return f", but its folder {newest} does: give that{others}"


def _rows_of_pair(
    where: str, weights: RawTensor, config: RawTensor, shapes: BaseShapes, limits: StagingLimits
) -> tuple[CanonicalRow, ...]:
    try:
        return trtllm.canonical_rows(weights, config, shapes, limits.max_ranks)
    except LoraplexError as error:
        raise type(error)(f"{where}: {error.message}") from error


def _listed(names: Iterable[str], most: int = 5) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - most} more tensors" if len(listed) > most else ""
    return (", ".join(repr(name) for name in listed[:most]) or "no tensors") + more
