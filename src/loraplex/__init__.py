"""loraplex: one server for a base model and thousands of its LoRA adapters.

from loraplex import LLM, SamplingParams
"""

from typing import TYPE_CHECKING, Any

from loraplex.core.environment import let_threads_sleep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.version import __version__

if TYPE_CHECKING:
    from loraplex.app.llm import LLM

__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Import LLM on first use: torch takes seconds, and most imports of loraplex need none."""
    if name == "LLM":
        let_threads_sleep()
        from loraplex.app.llm import LLM  # noqa: PLC0415

        return LLM
    raise AttributeError(f"module 'loraplex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
