"""Parameters of beam search. The algorithm is in `scheduling.beams`."""

import enum

import msgspec


class EarlyStopping(enum.StrEnum):
    """When beam search ends once it has `width` ended hypotheses.

    The values correspond to True, False and "never" of transformers.
    """

    AT_ONCE = "at_once"
    WHEN_UNLIKELY = "when_unlikely"
    """Once the best running beam, at its present length, would rank after the worst of them."""
    NEVER = "never"
    """Once every running beam, at any length, would rank after the worst of them."""


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Beam search with the defaults of transformers."""

    width: int
    length_penalty: float = 1.0
    """The score of a hypothesis is log probability / (number of new tokens ** length_penalty)."""
    diversity_rate: float = 0.0
    """Penalty of a candidate, multiplied by its rank within its beam (TensorRT-LLM's
    beam_search_diversity_rate)."""
    early_stopping: EarlyStopping = EarlyStopping.WHEN_UNLIKELY
