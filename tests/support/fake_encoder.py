"""An encoder whose images are texts: a digest stands for tokens, and its rows are embeddings.

So a prompt with an image has the bits of a prompt with these tokens in its place.
"""

import random

import torch

from loraplex.core.image import ImageSpan


class FakeEncoder:
    """Implements execution.steps.image_rows.ImageEncoder."""

    def __init__(self, embedding: torch.Tensor, max_tokens: int) -> None:
        """embedding: [vocab_size, hidden] of the decoder. max_tokens: of an image."""
        self._embedding = embedding
        self._max_tokens = max_tokens
        self.encoded: list[bytes] = []
        """Digests of the images that were encoded."""
        self.failing: set[bytes] = set()
        """Images whose encoding fails."""

    def image(self, number: int, first: int) -> ImageSpan:
        """Return an image at a place of a prompt."""
        digest = bytes([number] * 32)
        num_tokens = len(self.tokens_of(digest))
        return ImageSpan(first, num_tokens, digest, (1, 1, num_tokens))

    def tokens_of(self, digest: bytes) -> list[int]:
        """Return the tokens that stand for an image."""
        draws = random.Random(digest)
        num_tokens = draws.randint(self._max_tokens // 2, self._max_tokens)
        return [draws.randrange(len(self._embedding)) for _ in range(num_tokens)]

    def encode(self, digest: bytes) -> torch.Tensor:
        if digest in self.failing:
            raise ValueError("this image was to fail")
        self.encoded.append(digest)
        return self._embedding[self.tokens_of(digest)]
