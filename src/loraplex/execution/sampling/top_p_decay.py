"""A top-p that falls with every token: TensorRT-LLM's top_p_decay, top_p_min, top_p_reset_id."""

from collections.abc import Sequence

from loraplex.core.sampling_params import SamplingParams


class DecayingTopP:
    """A function of the output so far, kept up to date.

    The first token has top_p. After each token it is max(top_p * decay, top_p_min), and after the
    reset token what it was at first. Source: computeToppDecay in TensorRT-LLM's
    samplingTopPKernels.cu.
    """

    def __init__(self, params: SamplingParams, output: Sequence[int]) -> None:
        self._params = params
        self._value = params.top_p
        self.add(output)

    @staticmethod
    def matters(params: SamplingParams) -> bool:
        """Whether top_p ever changes."""
        return params.top_p_decay != 1.0 or params.top_p_min > params.top_p

    def add(self, token_ids: Sequence[int]) -> None:
        """They were produced."""
        self._value = self.after(token_ids)

    def after(self, token_ids: Sequence[int]) -> float:
        """Value if the tokens had been produced, too."""
        params, value = self._params, self._value
        for token_id in token_ids:
            if token_id == params.top_p_reset_id:
                value = params.top_p
            else:
                value = max(value * params.top_p_decay, params.top_p_min)
        return value
