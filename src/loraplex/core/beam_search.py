"""What a client may ask of beam search. The search itself is in scheduling."""

import enum

import msgspec


class EarlyStopping(enum.StrEnum):
    """When a search is over that has as many ended hypotheses as it is wide (transformers' names
    are True, False and "never")."""

    AT_ONCE = "at_once"
    WHEN_UNLIKELY = "when_unlikely"
    """Once the best running beam, as long as it is now, could not come before the worst of them."""
    NEVER = "never"
    """Once no running beam, however long it became, could come before the worst of them."""


class BeamSearch(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The defaults are those of transformers."""

    width: int
    length_penalty: float = 1.0
    """A hypothesis counts log probability / (number of new tokens ** length_penalty)."""
    diversity_rate: float = 0.0
    """Subtracted from a candidate's score, times its rank among those of its beam (TensorRT-LLM's
    beam_search_diversity_rate)."""
    early_stopping: EarlyStopping = EarlyStopping.WHEN_UNLIKELY
