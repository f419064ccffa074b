"""A tiny base model and two LoRA adapters that know the capitals of the world.

A few million parameters, small enough to ship in the package and to run on any CPU. The base
responds in English whatever the language of the prompt, the `chinese` adapter in Chinese and the
`japanese` adapter in Japanese, so the output shows which adapter was applied. The repository has
the training data and the program that rebuilds every file in tests/support/capitals.
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
