"""Pinned adapters stay on the device: those whose present version is pinned."""

import logging

from loraplex.adapters.store import AdapterVersion
from loraplex.core.errors import LoraplexError
from loraplex.serving.served_model import ServedModel

logger = logging.getLogger(__name__)


async def hold_pinned(model: ServedModel) -> None:
    """Let the engine hold what the store says, and nothing else.

    What cannot be held is said in the log and served as any other.
    """
    release_unpinned(model)
    for version in _pinned(model).values():
        try:
            await model.engine.hold(version.source)
        except LoraplexError as error:
            logger.warning(
                "adapter %r is pinned, but not held on the device: %s", version.name, error.message
            )


def release_unpinned(model: ServedModel) -> None:
    """Let the engine release what no present version pins any longer."""
    held = model.engine.held
    for digest in held and held - _pinned(model).keys():
        model.engine.release(digest)


def _pinned(model: ServedModel) -> dict[str, AdapterVersion]:
    """By digest; without those that no request could use."""
    present = model.store.present(model.card.name)
    return {
        version.digest: version
        for version in present
        if version.is_pinned and version.digest not in model.unfit
    }
