"""Whether a model's output layer is its embedding: the weights decide, not config.json alone.

A folder may have `tie_word_embeddings` and an `lm_head.weight` that differs from the embedding.
Then the stored one is the output layer, as in transformers 5. Free of torch, unless a tied model
has its weights in `.bin` files or in TensorRT-LLM's.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from loraplex.adapters.tensor_file import read_pieces, tensor_names
from loraplex.core.errors import LoraplexError
from loraplex.execution.weights.weight_files import weight_files
from loraplex.models.engine_folder import is_foreign_checkpoint
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec

_PIECE_BYTES = 8 << 20


def read_model(folder: Path) -> ModelSpec:
    """Read config.json, and whether the output layer is the embedding.

    Raises what read_config raises. Weights that are missing or broken are the loader's to refuse.
    """
    spec = read_config(folder)
    if spec.logits_bias and not _has_tensor(folder, spec.logits_bias):
        # transformers leaves a buffer out that is zero.
        spec = dataclasses.replace(spec, logits_bias="")
    if not spec.tie_word_embeddings or not _has_own_head(folder, spec):
        return spec
    return dataclasses.replace(spec, tie_word_embeddings=False)


def _has_tensor(folder: Path, name: str) -> bool:
    try:
        files = weight_files(folder)
    except LoraplexError:
        return True
    plain = [file for file in files if file.suffix == ".safetensors"]
    return len(plain) < len(files) or any(name in tensor_names(file) for file in plain)


def _has_own_head(folder: Path, spec: ModelSpec) -> bool:
    try:
        files = weight_files(folder)
        is_plain = all(file.suffix == ".safetensors" for file in files)
        if is_plain and not is_foreign_checkpoint(folder):
            return _differ_in_safetensors(files, spec)
        return _differ_in_others(folder, spec)
    except (LoraplexError, OSError, LookupError):
        return False


def _differ_in_safetensors(files: Sequence[Path], spec: ModelSpec) -> bool:
    places = {
        spec.names.canonical(name): (file, name) for file in files for name in tensor_names(file)
    }
    head, embedding = _names(spec)
    if spec.stored_format is not None and _has_parts(spec.names.lm_head, places):
        return True
    if head not in places:
        return False
    pairs = itertools.zip_longest(
        _rows(*places[head], spec.vocab_size), _rows(*places[embedding], spec.vocab_size)
    )
    return any(not np.array_equal(row, other) for row, other in pairs)


def _has_parts(module: str, places: Iterable[str | None]) -> bool:
    """Whether the module has more tensors than a weight and a bias: it is quantised."""
    own = {name for name in places if name is not None and name.startswith(f"{module}.")}
    return bool(own - {f"{module}.weight", f"{module}.bias"})


def _rows(path: Path, name: str, num_rows: int) -> Iterator[npt.NDArray[np.floating]]:
    pieces = read_pieces(path, name, _PIECE_BYTES)
    rows = itertools.chain.from_iterable(piece.array() for piece in pieces)
    return itertools.islice(rows, num_rows)


def _differ_in_others(folder: Path, spec: ModelSpec) -> bool:
    import torch  # noqa: PLC0415 - heavy, and serving needs it for no other folder

    from loraplex.execution.weights.checkpoint import open_files  # noqa: PLC0415

    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(file) for file in open_files(folder, spec)]
        places = {spec.names.canonical(name): (file, name) for file in files for name in file.names}
        names = _names(spec)
        if names[0] not in places:
            return False
        head, embedding = (
            file.tensor(stored)[: spec.vocab_size]
            for file, stored in (places[name] for name in names)
        )
        return not torch.equal(head, embedding.to(head.dtype))


def _names(spec: ModelSpec) -> tuple[str, str]:
    """Return the full names of the output layer's weight and of the embedding's."""
    names = spec.names
    return f"{names.lm_head}.weight", f"{names.root}{names.embedding}.weight"
