"""Files of a quantised checkpoint, seen as files of plain weights.

The tensors that stand for one weight, wherever they are, appear under the weight's name.
"""

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from loraplex.core.errors import ConfigError
from loraplex.execution.weights.quantized import (
    awq,
    bitsandbytes,
    compressed_tensors,
    four_bit_floats,
    fp8,
    gptq,
)
from loraplex.execution.weights.quantized.stored_weight import Scheme, StoredWeight, refuse_skipped
from loraplex.execution.weights.tensor_files import TensorFile
from loraplex.models.config_fields import ConfigFields
from loraplex.models.stored_format import StoredFormat, StoredMethod

logger = logging.getLogger(__name__)

_SCHEMES: Final[Mapping[StoredMethod, Callable[[ConfigFields], Scheme]]] = {
    StoredMethod.FP8: fp8.scheme,
    StoredMethod.COMPRESSED_TENSORS: compressed_tensors.scheme,
    StoredMethod.GPTQ: gptq.scheme,
    StoredMethod.AWQ: awq.scheme,
    StoredMethod.BITSANDBYTES: bitsandbytes.scheme,
    StoredMethod.MXFP4: four_bit_floats.scheme,
    StoredMethod.NVFP4: four_bit_floats.modelopt_scheme,
}


class QuantizedFiles:
    """Implements `TensorFile` for all files of a folder together; closes them."""

    def __init__(
        self,
        folder: Path,
        files: Sequence[TensorFile],
        form: StoredFormat,
        *,
        has_transposed_weights: bool,
    ) -> None:
        """has_transposed_weights: DecoderNames.has_transposed_weights; a format has its own order.

        Raises ConfigError for a name that is there twice.
        """
        self.path = folder
        self._stack = contextlib.ExitStack()
        self._scheme = _SCHEMES[form.method](form.fields)
        self._is_transposed = self._scheme.is_transposed or has_transposed_weights
        self._places: dict[str, TensorFile] = {}
        for file in files:
            self._stack.enter_context(file)
            for name in file.names:
                if self._places.setdefault(name, file) is not file:
                    raise ConfigError(f"{file.path}: weight {name} is there twice")
        self._parts = self._found()
        refuse_skipped(form.fields, [name.removesuffix(".weight") for name in self._parts])
        taken = {name for parts in self._parts.values() for name in parts.values()}
        ignored = {name for name in self._places if name.endswith(self._scheme.ignored)}
        if ignored - taken:
            logger.info(
                "%s: %d scales of activations and of the KV cache are not used: only weights are "
                "quantised here",
                *(folder, len(ignored - taken)),
            )
        self.names: Sequence[str] = [
            *(name for name in self._places if name not in taken | ignored),
            *self._parts,
        ]
        # The experts of a layer are one tensor, of which each is read by itself.
        self._last: tuple[str, torch.Tensor] | None = None
        self._last_stored: tuple[str, StoredWeight] | None = None

    def __enter__(self) -> "QuantizedFiles":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._last = self._last_stored = None
        self._stack.close()

    def tensor(self, name: str) -> Any:
        """Return a tensor; a quantised weight as float32, in the order of the model's weights."""
        if name not in self._parts:
            return self._places[name].tensor(name)
        if self._last is None or self._last[0] != name:
            stored = self.stored(name)
            assert stored is not None
            decoded = stored.decoded()
            self._last = name, decoded.mT if self._is_transposed else decoded
        return self._last[1]

    def stored(self, name: str) -> StoredWeight | None:
        """Return a quantised weight [..., out, in] as it is, None for others.

        Raises ConfigError, which names it.
        """
        if name not in self._parts:
            return None
        if self._last_stored is None or self._last_stored[0] != name:
            parts = {
                part: self._places[full].tensor(full) for part, full in self._parts[name].items()
            }
            stored = self._scheme.decode(name.removesuffix(self._scheme.weight), parts)
            self._last_stored = name, stored
        return self._last_stored[1]

    def _found(self) -> dict[str, dict[str, str]]:
        """Return the full names of each quantised weight's tensors, by their ends."""
        found: dict[str, dict[str, str]] = {}
        for name in self._places:
            marker = next((end for end in self._scheme.markers if name.endswith(end)), None)
            if marker is None:
                continue
            module = name.removesuffix(marker)
            found.setdefault(
                module + self._scheme.weight,
                {
                    part: module + part
                    for part in self._scheme.parts
                    if module + part in self._places
                },
            )
        return found
