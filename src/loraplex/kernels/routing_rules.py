"""How a layer chooses the experts of a token, as values. Free of torch."""

import dataclasses
import enum


class RoutingMode(enum.StrEnum):
    """How scores become choices and weights. Of equal scores the lowest expert is chosen."""

    SOFTMAX = "softmax"
    """The largest sums of softmax over all experts and selection bias, if any; as in SIGMOID."""
    CHOSEN_SOFTMAX = "chosen_softmax"
    """The largest logits; the weights are a softmax over these."""
    SIGMOID = "sigmoid"
    """The largest sums of sigmoid and selection bias; the weights are the sigmoids alone."""
    SPARSE_MIXER = "sparse_mixer"
    """SparseMixer (arXiv:2310.00811): the largest logit, then the largest of the others. The weight
    of each is its share of a softmax over those of its round that lie within the jitter."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoutingRules:
    """How a layer chooses experts. With several groups an expert can only be chosen in the best."""

    num_experts: int
    num_chosen: int
    mode: RoutingMode
    normalizes: bool = False
    """Whether the weights of a token are divided by their sum."""
    sum_floor: float = 1e-20
    """Number that is added to this sum, by default as DeepSeek-V3 has it."""
    factor: float = 1.0
    """Factor of all weights."""
    weighs_input: bool = False
    """Whether the weight multiplies what an expert reads, and not what it gives.

    Only where a token has one expert, whose layers have no bias.
    """
    num_groups: int = 1
    """Groups of neighbouring experts, of one size."""
    num_chosen_groups: int = 1
    """Those with the best expert (SOFTMAX), or the best sum of two experts (SIGMOID)."""
    jitter: float = 0.0
    """Epsilon of SPARSE_MIXER: an expert is out if (max - s) / max(|s|, max) > 2 * epsilon."""
