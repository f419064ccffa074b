"""Inputs of an encoder: computed before the rows of a step, and kept in the rows' blocks."""

import logging
import sys
from collections.abc import Callable
from typing import Protocol

import torch

from loraplex.core.errors import DeviceLost, ErrorInfo, RowFailedError
from loraplex.execution.adapters.bank import AdapterBank
from loraplex.execution.sizing.shortage import RowsThatFit
from loraplex.execution.steps.input_batch import EncoderInput
from loraplex.execution.steps.kv_cache import KVCache
from loraplex.execution.steps.tensors import StepTensors
from loraplex.models.batch import ForwardBatch
from loraplex.models.decoder import Decoder

_LOGGER = logging.getLogger(__name__)

_LAST_LAYER = sys.maxsize
"""Greater than the number of any layer: an encoder may have more of them than the decoder."""


class TextEncoder(Protocol):
    """Encoder of a model whose decoder has cross attention."""

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute the output [T, size] of the T tokens of one input.

        batch.lora: the adapters of the row; all of them have arrived. Raises whatever goes wrong:
        then the row fails, and no others.
        """
        ...


class TextInputs:
    """Encodes inputs one by one, so that each has the same bits in any step.

    What an input needs on the device is overwritten by the next one, and then by the rows, in the
    order of the compute queue. So the bank has no second LoRA batch for it.
    """

    def __init__(
        self,
        encoder: TextEncoder,
        decoder: Decoder,
        kv_cache: KVCache,
        adapter_bank: AdapterBank,
        tensors: StepTensors,
        *,
        trim: Callable[[], None],
        is_alone: bool,
    ) -> None:
        """trim, is_alone: see RowsThatFit."""
        self._encoder = encoder
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._adapter_bank = adapter_bank
        self._tensors = tensors
        self._trim = trim
        self._is_alone = is_alone

    def encode(self, given: EncoderInput) -> ErrorInfo | None:
        """Encode an input, whose adapters must be in the bank, and return what went wrong.

        Raises DeviceLost, and on one rank of several every error: the others have to know it.
        """
        fitting = RowsThatFit([len(given.token_ids)], self._trim, is_alone=self._is_alone)
        try:
            fitting.attempt(lambda _: self._encode(given))
        except DeviceLost:
            raise
        except Exception as error:
            if not self._is_alone:
                raise
            _LOGGER.exception("encoding the input of slot %d failed", given.slot)
            reason = f"the encoder's input could not be encoded: {error}"
            return RowFailedError(reason).to_info()
        return fitting.lost.get(0)

    def _encode(self, given: EncoderInput) -> None:
        lora = self._adapter_bank.lora_batch(((len(given.token_ids), given.adapters),))
        if lora is not None and lora.arrivals is not None:
            lora.arrivals.wait_for(_LAST_LAYER)
        batch = self._tensors.encoder_batch(given, lora)
        self._decoder.encode(self._encoder.encode(batch), batch, self._kv_cache.storages)
