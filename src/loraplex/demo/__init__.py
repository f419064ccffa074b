"""A tiny base model and two LoRA adapters that know the capitals of the world.

A few million parameters, small enough to ship in the package and to run on any CPU. The
base answers in English whatever the language of the question; the `chinese` adapter
answers in Chinese, the `japanese` adapter in Japanese. So one glance at an answer shows
which adapter was applied. `corpus` says what they know, `train` rebuilds every file.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

__all__ = ["ADAPTER_PATHS", "BASE_PATH"]

_ROOT = Path(__file__).parent

BASE_PATH: Path = _ROOT / "base"
ADAPTER_PATHS: Mapping[str, Path] = MappingProxyType(
    {"chinese": _ROOT / "chinese", "japanese": _ROOT / "japanese"}
)
