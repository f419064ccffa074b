"""Codes of a few bits in 32-bit words: value k is the bits bk to bk + b - 1 of their bit string.

The words are little-endian: bit 0 of word 0 is the first. GPTQ, and compressed-tensors for weights
and zero points, store them so; a code of 3 bits may lie in two words.
"""

import torch

_WORD_BITS = 32


def unpacked(words: torch.Tensor, bits: int, dim: int, num_values: int) -> torch.Tensor:
    """Return the first num_values codes along `dim`, as uint8. words: int32, bits: 1 to 8."""
    words = words.movedim(dim, -1)
    # 32 codes fill `bits` words, whatever their size.
    words = torch.nn.functional.pad(words, (0, -words.shape[-1] % bits))
    rounds = words.reshape(*words.shape[:-1], -1, bits)
    codes = torch.empty((*rounds.shape[:-1], _WORD_BITS), dtype=torch.uint8)
    for index in range(_WORD_BITS):
        word, shift = divmod(index * bits, _WORD_BITS)
        low_bits = min(bits, _WORD_BITS - shift)
        code = (rounds[..., word] >> shift) & ((1 << low_bits) - 1)
        if low_bits < bits:
            code |= (rounds[..., word + 1] & ((1 << (bits - low_bits)) - 1)) << low_bits
        codes[..., index] = code.to(torch.uint8)
    return codes.flatten(-2)[..., :num_values].movedim(-1, dim)


def packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the words of codes along the last axis: [..., n] uint8 -> [..., num_words] int32."""
    num_values = codes.shape[-1]
    codes = torch.nn.functional.pad(codes, (0, -num_values % _WORD_BITS))
    rounds = codes.reshape(*codes.shape[:-1], -1, _WORD_BITS).int()
    words = torch.zeros((*rounds.shape[:-1], bits), dtype=torch.int32)
    for index in range(_WORD_BITS):
        word, shift = divmod(index * bits, _WORD_BITS)
        words[..., word] |= rounds[..., index] << shift
        if shift + bits > _WORD_BITS:
            words[..., word + 1] |= rounds[..., index] >> (_WORD_BITS - shift)
    return words.flatten(-2)[..., : num_words(num_values, bits)].contiguous()


def num_words(num_values: int, bits: int) -> int:
    """Return how many words so many codes take."""
    return -(-num_values * bits // _WORD_BITS)


def bits_of(words: int, num_values: int) -> int | None:
    """Return how many bits each of num_values codes in so many words has; None: no number fits."""
    return next((bits for bits in range(1, 9) if num_words(num_values, bits) == words), None)


def nibbles(packed: torch.Tensor, *, low_first: bool) -> torch.Tensor:
    """Return the two codes of each byte along the last axis: [..., n] uint8 -> [..., 2 n]."""
    low, high = packed & 15, packed >> 4
    return torch.stack((low, high) if low_first else (high, low), dim=-1).flatten(-2)
