"""The tokens that the reference draws from the weights of a GPU's kernels."""

import numpy as np
import numpy.typing as npt
import torch

from loraplex.kernels import sampling
from loraplex.kernels.cuda.sampling import token_weights
from loraplex.kernels.sampling import DrawOptions, IntArray


def reference_draws(logits: torch.Tensor, rows: IntArray, options: DrawOptions) -> torch.Tensor:
    """Draw tokens like sampling.draw_tokens with the device's exp; int64 [n] on its device."""

    def column(array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array.copy()).to(logits.device).unsqueeze(1)

    taken = logits[column(rows).squeeze(1)]
    weights = token_weights(taken, column(options.temperature).squeeze(1))
    by_k = column(((options.top_k > 0) & (options.top_k < logits.shape[1])).nonzero()[0]).squeeze(1)
    if len(by_k):
        kept = sampling.keep_top_k(taken[by_k], column(options.top_k)[by_k])
        weights[by_k] = weights[by_k].masked_fill(kept == -torch.inf, 0)
    by_p = column((options.top_p < 1.0).nonzero()[0]).squeeze(1)
    if len(by_p):
        weights[by_p] = sampling.keep_top_p(weights[by_p], column(options.top_p)[by_p])
    weights = sampling.keep_min_p(weights, column(options.min_p))
    return sampling.draw(weights, column(options.uniforms).squeeze(1))
