"""Random weights in the block formats of GGUF files, drawn as blocks: nothing is quantised.

A block's scales are constants and its quants are random bits, so each weight is uniform over the
levels of its type, with mean 0 and a set standard deviation. Kernels read and multiply such a block
as they do any other. Formats: ggml/src/ggml-common.h of llama.cpp.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from loraplex.bench.random_adapters import to_bfloat16
from loraplex.core.errors import ConfigError
from loraplex.core.gguf import BlockType

Bytes = NDArray[np.uint8]

# Twelve bytes of six-bit scales and minimums of eight sub-blocks, all of them 32: four bytes with
# the lower bits of the first scales and the upper ones of the last, four of minimums, four of both.
_K_SCALES = np.frombuffer(bytes([0xA0] * 8 + [0x00] * 4), np.uint8)
_K_SCALE = 32
_Q6_SCALE = 16
_ROWS_AT_ONCE = 4096


def uniform_deviation(num_levels: int) -> float:
    """Return the standard deviation of a number that is any of 0 to num_levels - 1."""
    return float(((num_levels**2 - 1) / 12) ** 0.5)


def random_rows(
    kind: BlockType,
    size: tuple[int, int],
    deviation: float,
    draws: np.random.Generator,
    num_zero_rows: int = 0,
) -> Bytes:
    """Return a random matrix (rows, bytes of a row) of weights of a block type.

    size: (out, in). deviation: standard deviation of the weights. num_zero_rows: of the first rows,
    whose weights are all 0. Raises ConfigError for a type that is not made here, and for rows that
    are no whole blocks.
    """
    if kind not in _MAKERS:
        known = ", ".join(each.name for each in _MAKERS)
        raise ConfigError(f"random blocks are of {known}; {kind.name} is none")
    rows, columns = size
    if columns % kind.num_values:
        raise ConfigError(
            f"rows of {columns} weights are no whole blocks of {kind.name}, which have "
            f"{kind.num_values}"
        )
    num_blocks = columns // kind.num_values
    found = np.empty((rows, num_blocks * kind.num_bytes), np.uint8)
    # In pieces, because what is computed on the way takes several times the memory of the result.
    for start in range(0, rows, _ROWS_AT_ONCE):
        piece = found[start : start + _ROWS_AT_ONCE]
        made = _MAKERS[kind](len(piece) * num_blocks, deviation, draws)
        piece[:] = made.reshape(len(piece), -1)
    found[:num_zero_rows] = 0
    return found


def _random_bytes(draws: np.random.Generator, rows: int, columns: int) -> Bytes:
    """Draw whole words of the generator: ten times as fast as its bytes."""
    words = draws.bit_generator.random_raw(-(-rows * columns // 8))
    return words.view(np.uint8)[: rows * columns].reshape(rows, columns)


def _half(value: float) -> Bytes:
    return np.frombuffer(np.float16(value).tobytes(), np.uint8)


def _k_blocks(
    kind: BlockType, num_levels: int, count: int, deviation: float, draws: np.random.Generator
) -> Bytes:
    """Blocks of Q4_K or Q5_K: d, dmin, scales, quants. A weight is d * 32 * q - dmin * 32."""
    blocks = _random_bytes(draws, count, kind.num_bytes)
    scale = deviation / (_K_SCALE * uniform_deviation(num_levels))
    blocks[:, 0:2] = _half(scale)
    blocks[:, 2:4] = _half(scale * (num_levels - 1) / 2)
    blocks[:, 4:16] = _K_SCALES
    return blocks


def _q6_k(count: int, deviation: float, draws: np.random.Generator) -> Bytes:
    """Lower bits, upper bits, signed scales of 16 sub-blocks, d. A weight is d * s * (q - 32)."""
    blocks = _random_bytes(draws, count, BlockType.Q6_K.num_bytes)
    # q - 32 has the mean -1/2; scales of both signs give the weights the mean 0.
    signs = blocks[:, 192:208].view(np.int8)
    blocks[:, 192:208] = np.where(signs < 0, -_Q6_SCALE, _Q6_SCALE).astype(np.int8).view(np.uint8)
    blocks[:, 208:210] = _half(deviation / (_Q6_SCALE * uniform_deviation(64)))
    return blocks


def _q8_0(count: int, deviation: float, draws: np.random.Generator) -> Bytes:
    blocks = _random_bytes(draws, count, BlockType.Q8_0.num_bytes)
    blocks[:, 0:2] = _half(deviation / uniform_deviation(256))
    return blocks


def _normal(count: int, deviation: float, draws: np.random.Generator) -> NDArray[np.float32]:
    return draws.standard_normal((count, 1), dtype=np.float32) * np.float32(deviation)


_Maker = Callable[[int, float, np.random.Generator], Bytes]
_MAKERS: dict[BlockType, _Maker] = {
    BlockType.F16: lambda *given: _normal(*given).astype("<f2").view(np.uint8),
    BlockType.BF16: lambda *given: to_bfloat16(_normal(*given)).astype("<u2").view(np.uint8),
    BlockType.Q8_0: _q8_0,
    BlockType.Q4_K: lambda *given: _k_blocks(BlockType.Q4_K, 16, *given),
    BlockType.Q5_K: lambda *given: _k_blocks(BlockType.Q5_K, 32, *given),
    BlockType.Q6_K: _q6_k,
}
