"""Meanings of the names that clients put into `model`: a base model, an adapter, or both joined."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from loraplex.serving.backend import ModelCard

_SEPARATORS: Final = (":", "_")
"""Separators of base model and adapter, in the order in which they are tried: Ray Serve and
GPUStack join names with a colon, KubeAI with an underscore."""


def base_of(name: str, cards: Iterable[ModelCard]) -> str | None:
    """Return the base model that has this name; None: no model has it."""
    return next((card.name for card in cards if name in card.names), None)


def readings(name: str, cards: Sequence[ModelCard]) -> Iterator[list[tuple[str, str]]]:
    """Yield groups of (base model, adapter) that a name can mean, the most exact first.

    The first group with an adapter that exists decides.
    """
    yield [(card.name, name) for card in cards]
    for separator in _SEPARATORS:
        yield [
            (card.name, name.removeprefix(f"{own}{separator}"))
            for card in cards
            for own in card.names
            if name.startswith(f"{own}{separator}")
        ]
