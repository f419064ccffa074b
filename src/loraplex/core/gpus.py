"""GPUs of this machine, counted without a library that takes seconds to import."""

import re
from pathlib import Path
from typing import Final

from loraplex.core.environment import visible_gpus

_DEVICES: Final = Path("/dev")
_GPUS: Final = re.compile(r"nvidia[0-9]+")


def num_gpus(devices: Path = _DEVICES) -> int:
    """Return the number of NVIDIA GPUs that this process may use."""
    found = sum(bool(_GPUS.fullmatch(entry.name)) for entry in devices.iterdir())
    visible = visible_gpus()
    return found if visible is None else min(found, visible)
