"""Images of a prompt as the engine knows them: where they are, and what identifies them."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

DIGEST_BYTES: Final = 32


class ImageSpan(msgspec.Struct, frozen=True):
    """Positions of a prompt that are the rows of an encoded image."""

    first: int
    num_tokens: int
    digest: bytes
    """SHA-256 of the pixels after processing, the grid and the processor: equal for equal rows."""
    grid: tuple[int, int, int]
    """Number of patches: frames, rows and columns, from which rotary positions follow."""

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.first + self.num_tokens


def images_in(images: Iterable[ImageSpan], start: int, stop: int) -> list[ImageSpan]:
    """Return the images that have any of the positions from start up to stop."""
    return [image for image in images if image.first < stop and start < image.end]


def images_problem(
    images: Sequence[ImageSpan], token_ids: Sequence[int], placeholder_id: int, max_tokens: int
) -> str | None:
    """Return why images are no part of a prompt of these tokens, or too large; None if they are."""
    ends = [0, *(image.end for image in images)]
    for image, last_end in zip(images, ends, strict=False):
        place = f"the image at position {image.first}"
        if image.first < last_end or image.end > len(token_ids):
            return f"{place} is out of its order, or of the prompt of {len(token_ids)} tokens"
        if not 1 <= image.num_tokens <= max_tokens:
            return f"{place} has {image.num_tokens} tokens, not 1 to {max_tokens}"
        if len(image.digest) != DIGEST_BYTES:
            return f"{place} has a digest of {len(image.digest)} bytes, not {DIGEST_BYTES}"
        if set(token_ids[image.first : image.end]) != {placeholder_id}:
            return f"{place} has tokens other than {placeholder_id}, which stands for images"
    return None
