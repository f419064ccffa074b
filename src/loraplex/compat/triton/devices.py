"""The GPU that a repository names for a model; `auto` is the choice for the others."""

import re
from collections.abc import Iterator

from loraplex.compat.triton.model_folder import ModelFolder
from loraplex.compat.triton.notes import Notes
from loraplex.core.config_layers import Layer
from loraplex.core.devices import find_device

_KEY = "gpu_device_ids"


def has_gpu() -> bool:
    """Return whether models run on a GPU where nothing sets their device."""
    return find_device().name != "cpu"


def device_layer(folder: ModelFolder, notes: Notes) -> Iterator[Layer]:
    """Parse gpu_device_ids: numbers with commas between them, instances with semicolons.

    Raises ConfigError.
    """
    written = folder.parameters.text(_KEY)
    numbers = [] if written is None else re.split(r"[,;]", written)
    if not all(number.strip().isdigit() for number in numbers):
        raise folder.parameters.error(
            _KEY, f"{written!r} must be numbers of GPUs with commas between them, as 0 or 0,1"
        )
    if written is None:
        return
    if not has_gpu():
        notes.info(f"{folder.name}: {_KEY} has no effect: this machine has no GPU for models")
        return
    device = f"cuda:{int(numbers[0])}"
    if len(numbers) > 1:
        notes.warning(f"{folder.name}: of the GPUs {written} one is used: {device}")
    yield Layer(folder.parameters.place(_KEY), {"models": {folder.name: {"device": device}}})
