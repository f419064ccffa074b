"""Native sampling ops (native/include/loraplex/sampling.h). torch does nothing but exp here.

So the drawn tokens are those of the torch reference, bit for bit: all the rest is exact.
"""

import ctypes

import numpy as np
import torch

from loraplex.kernels.native.library import (
    DTYPES,
    Int,
    NativeLibrary,
    Pointer,
    Size,
    ThreadPool,
)
from loraplex.kernels.sampling import DrawOptions, IntArray, TopLogprobs

_CHUNK_ELEMENTS = 1 << 20
"""Elements of the buffers: few enough rows are drawn at a time to stay in the caches."""


class _Logits(ctypes.Structure):
    """loraplex_logits"""

    _fields_ = (
        ("values", Pointer),
        ("stride", Size),
        ("n", Size),
        ("num_rows", Size),
        ("rows", Pointer),
    )


class NativeSampling:
    """Keeps the buffers of a draw. Used by one thread."""

    def __init__(self, library: NativeLibrary, pool: ThreadPool) -> None:
        self._pool = pool
        self._argmax = library.function(
            "loraplex_argmax", Pointer, Size, Size, Int, Pointer, Size, *(3 * (Pointer,))
        )
        self._scale = library.function("loraplex_scale_candidates", *(7 * (Pointer,)))
        self._draw = library.function("loraplex_draw", Pointer, Size, Size, *(7 * (Pointer,)))
        self._top_logprobs = library.function(
            "loraplex_top_logprobs", *(3 * (Pointer,)), Size, *(4 * (Pointer,))
        )
        self._apply_bitmask = library.function(
            "loraplex_apply_bitmask", Pointer, Size, Size, *(2 * (Pointer,)), Size, Pointer, Size
        )
        self._scaled = torch.zeros(0)
        self._indices = torch.zeros(0, dtype=torch.int32)

    def argmax(self, logits: torch.Tensor, rows: IntArray) -> tuple[torch.Tensor, torch.Tensor]:
        """Implement Kernels.argmax."""
        assert logits.stride(1) == 1 or logits.shape[1] == 1
        assert rows.flags.c_contiguous
        indices = torch.empty(len(rows), dtype=torch.int64)
        maxima = torch.empty(len(rows))
        self._argmax(
            *(self._pool.address, len(rows), logits.shape[1], DTYPES[logits.dtype]),
            *(logits.data_ptr(), logits.stride(0), rows.ctypes.data),
            *(indices.data_ptr(), maxima.data_ptr()),
        )
        return indices, maxima

    def draw_tokens(
        self, logits: torch.Tensor, rows: IntArray, options: DrawOptions
    ) -> torch.Tensor:
        """Implement Kernels.draw_tokens."""
        vocab_size = logits.shape[1]
        chunk_rows = max(1, _CHUNK_ELEMENTS // vocab_size)
        drawn = np.empty(len(rows), dtype=np.int64)
        # Rows with few candidates go together: exp is taken of the widest row's number of them.
        order = np.argsort(options.top_k == 0, kind="stable")
        with torch.inference_mode():
            for first in range(0, len(rows), chunk_rows):
                chunk = order[first : first + chunk_rows]
                drawn[chunk] = self._draw_chunk(logits, rows[chunk], _of_rows(options, chunk))
        return torch.from_numpy(drawn)

    def _draw_chunk(self, logits: torch.Tensor, rows: IntArray, options: DrawOptions) -> IntArray:
        num_rows, vocab_size = len(rows), logits.shape[1]
        scaled, indices = self._buffers(num_rows, vocab_size)
        counts, drawn = np.empty(num_rows, dtype=np.int64), np.empty(num_rows, dtype=np.int64)
        self._scale(
            *(self._pool.address, ctypes.byref(_described(logits, rows))),
            *(options.top_k.ctypes.data, options.temperature.ctypes.data, counts.ctypes.data),
            *(indices.data_ptr(), scaled.data_ptr()),
        )
        scaled[:, : int(counts.max())].exp_()
        self._draw(
            *(self._pool.address, num_rows, vocab_size, counts.ctypes.data),
            *(indices.data_ptr(), scaled.data_ptr()),
            *(options.top_p.ctypes.data, options.min_p.ctypes.data),
            *(options.uniforms.ctypes.data, drawn.ctypes.data),
        )
        return drawn

    def _buffers(self, num_rows: int, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = num_rows * vocab_size
        if len(self._scaled) < size:
            self._scaled = torch.zeros(size)
            self._indices = torch.zeros(size, dtype=torch.int32)
        scaled, indices = self._scaled[:size], self._indices[:size]
        return scaled.view(num_rows, vocab_size), indices.view(num_rows, vocab_size)

    def top_logprobs(
        self, logits: torch.Tensor, rows: IntArray, token_ids: IntArray, num_top: int
    ) -> TopLogprobs:
        """Implement Kernels.top_logprobs."""
        num_rows = len(rows)
        result = TopLogprobs(
            torch.empty(num_rows),
            torch.empty(num_rows, dtype=torch.int64),
            torch.empty(num_rows, num_top, dtype=torch.int64),
            torch.empty(num_rows, num_top),
        )
        self._top_logprobs(
            *(self._pool.address, ctypes.byref(_described(logits, rows))),
            *(token_ids.ctypes.data, num_top),
            *(result.logprobs.data_ptr(), result.ranks.data_ptr()),
            *(result.top_ids.data_ptr(), result.top_logprobs.data_ptr()),
        )
        return result

    def apply_bitmask(self, logits: torch.Tensor, rows: IntArray, bitmask: torch.Tensor) -> None:
        """Implement Kernels.apply_bitmask."""
        num_rows, vocab_size = len(rows), logits.shape[1]
        assert logits.dtype == torch.float32
        assert bitmask.dtype == torch.int32
        assert bitmask.shape == (num_rows, -(-vocab_size // 32))
        assert logits.stride(1) == 1 or vocab_size == 1
        assert rows.flags.c_contiguous
        assert bitmask.stride(1) == 1 or bitmask.shape[1] == 1
        self._apply_bitmask(
            *(self._pool.address, num_rows, vocab_size, rows.ctypes.data),
            *(bitmask.data_ptr(), bitmask.stride(0), logits.data_ptr(), logits.stride(0)),
        )


def _described(logits: torch.Tensor, rows: IntArray) -> _Logits:
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1 or logits.shape[1] == 1
    assert rows.flags.c_contiguous
    return _Logits(
        logits.data_ptr(), logits.stride(0), logits.shape[1], len(rows), rows.ctypes.data
    )


def _of_rows(options: DrawOptions, rows: IntArray) -> DrawOptions:
    return DrawOptions(
        options.temperature[rows],
        options.top_k[rows],
        options.top_p[rows],
        options.min_p[rows],
        options.uniforms[rows],
    )
