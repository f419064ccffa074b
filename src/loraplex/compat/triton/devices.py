"""Which device a repository's models run on: a GPU, if this machine has one."""

import re
from collections.abc import Iterator

from loraplex.compat.triton.model_folder import ModelFolder
from loraplex.compat.triton.notes import Notes
from loraplex.core.config_layers import Layer
from loraplex.core.gpus import num_gpus

_KEY = "gpu_device_ids"


def has_gpu() -> bool:
    return num_gpus() > 0


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
    if not has_gpu():
        if written is not None:
            notes.info(f"{folder.name}: {_KEY} has no effect: this machine has no GPU")
        return
    device = "cuda" if not numbers else f"cuda:{int(numbers[0])}"
    if len(numbers) > 1:
        notes.warning(f"{folder.name}: of the GPUs {written} one is used: {device}")
    source = "this machine's GPU" if written is None else folder.parameters.place(_KEY)
    yield Layer(source, {"models": {folder.name: {"device": device}}})
