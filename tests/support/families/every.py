"""The cases of all families by name."""

from support.families import (
    convolutions,
    experts,
    first,
    gemma4,
    hybrids,
    latent,
    recent,
    recent_experts,
    rest,
    state_spaces,
)

CASES = {
    **first.CASES,
    **gemma4.CASES,
    **rest.CASES,
    **recent.CASES,
    **recent_experts.CASES,
    **experts.CASES,
    **hybrids.CASES,
    **state_spaces.CASES,
    **convolutions.CASES,
    **latent.CASES,
}
