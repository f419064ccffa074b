"""Rows of encoded images: computed before the rows of a step, read in place of embeddings."""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch

from loraplex.core.errors import DeviceLost
from loraplex.core.plan import CellId, EncodeImage, ImageCapacity
from loraplex.execution.steps.input_batch import EncodedSpan
from loraplex.models.batch import EncodedRows

_LOGGER = logging.getLogger(__name__)


class ImageEncoder(Protocol):
    """Encoder of a model's images. It has no LoRA."""

    def encode(self, digest: bytes) -> torch.Tensor:
        """Compute the rows of an image, [num_tokens, hidden], one for each of its positions.

        They depend on the image alone: not on the step, nor on other images. Raises whatever goes
        wrong: then the rows of the step that read the image fail, and no others.
        """
        ...


class ImageRows:
    """The rows of images, by cell."""

    def __init__(
        self,
        encoder: ImageEncoder,
        capacity: ImageCapacity,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._encoder = encoder
        shape = (capacity.num_cells, capacity.max_tokens, hidden_size)
        self._rows = torch.zeros(shape, dtype=dtype, device=device)
        self._num_rows = [0] * capacity.num_cells
        self._problems: dict[CellId, str] = {}
        """Cells whose image could not be encoded, and why."""

    def encode(self, encodes: Sequence[EncodeImage]) -> None:
        """Encode images one by one, so that each has the same bits in any step."""
        for encode in encodes:
            self._problems.pop(encode.cell, None)
            self._num_rows[encode.cell] = 0
            try:
                rows = self._encoder.encode(encode.digest)
                self._rows[encode.cell, : len(rows)] = rows
                self._num_rows[encode.cell] = len(rows)
            except DeviceLost:
                raise
            except Exception as error:
                _LOGGER.exception("encoding image %s failed", encode.digest.hex())
                self._problems[encode.cell] = f"an image could not be encoded: {error}"

    def problems(self, spans: Sequence[EncodedSpan]) -> dict[CellId, str]:
        """Return the cells that lack rows of these spans, and why."""
        found = {}
        for span in spans:
            stop, num_rows = span.first_row + span.num_tokens, self._num_rows[span.cell]
            if stop > num_rows:
                missing = f"an image has {stop} positions or more, and {num_rows} encoded rows"
                found[span.cell] = self._problems.get(span.cell, missing)
        return found

    def of_spans(self, spans: Sequence[EncodedSpan]) -> tuple[EncodedRows, ...]:
        """Return views of the rows of these spans."""
        return tuple(
            EncodedRows(
                span.first_token,
                self._rows[span.cell, span.first_row : span.first_row + span.num_tokens],
            )
            for span in spans
        )
