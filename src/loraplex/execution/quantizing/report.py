"""What a quantised model differs by, layer by layer."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from loraplex.execution.quantizing.rounding import WeightError


@dataclasses.dataclass(frozen=True, slots=True)
class LayerError:
    name: str
    """Name of the linear layer in the checkpoint; * stands for the numbers of its experts."""
    shape: tuple[int, int]
    """[out, in], of one expert."""
    group_size: int | None
    """Inputs that share a scale; None: all."""
    error: WeightError


@dataclasses.dataclass(frozen=True, slots=True)
class QuantizeReport:
    layers: Sequence[LayerError]
    source_bytes: int
    """Bytes of the source's files of weights."""
    written_bytes: int
    """Bytes of all tensors that were written."""

    @property
    def total(self) -> WeightError:
        return sum((layer.error for layer in self.layers), WeightError(0.0, 0.0))

    def as_json(self) -> Mapping[str, Any]:
        """Return relative errors in the 2-norm, and bytes."""
        return {
            "layers": [
                {
                    "name": layer.name,
                    "shape": list(layer.shape),
                    "group_size": layer.group_size,
                    **_relative(layer.error),
                }
                for layer in self.layers
            ],
            "total": _relative(self.total),
            "source_bytes": self.source_bytes,
            "written_bytes": self.written_bytes,
        }


def _relative(error: WeightError) -> dict[str, float | None]:
    return {"weight_error": error.relative_weight, "output_error": error.relative_output}
