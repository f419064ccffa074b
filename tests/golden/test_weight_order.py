"""Order in which a decoder's weights are requested: it is the format of packed weights.

A file that an earlier version packed has no names, so a changed order would give a layer another
layer's weights. `weight_order.json` has a digest of all requests of each family, whole and of ranks
and stages. If a change of the order is wanted, packed files need another version, and
`PYTHONPATH=tests python tests/golden/test_weight_order.py` writes the digests anew.
"""

import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from loraplex.core.errors import ConfigError
from loraplex.kernels.ops import PackedLinear
from loraplex.models.linear_group import TensorShard
from loraplex.models.parameters import LinearPlace, build_parameters
from loraplex.models.registry import read_config
from loraplex.models.sharding import shard
from loraplex.models.spec import ModelSpec
from loraplex.models.stages import PipelineStage, stage
from support.families import case, every

CASES = every.CASES
QUICK = [name for name, each in CASES.items() if each.is_quick]
RECORDED = Path(__file__).with_name("weight_order.json")


class Requests:
    """Source of weights that writes down what is requested."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def tensor(
        self, name: str, shape: tuple[int, ...], num_rows: int | None = None
    ) -> torch.Tensor:
        self.lines.append(f"tensor {name} {shape} {num_rows}")
        return torch.empty(shape, device="meta")[:num_rows]

    def linear(self, place: LinearPlace) -> PackedLinear:
        if place.is_embedding:
            return None
        flags = (place.has_bias, place.is_lm_head, place.is_choice, place.has_unit_rows)
        outputs = place.own_outputs and [[tuple(span) for span in own] for own in place.own_outputs]
        inputs = place.own_inputs and tuple(place.own_inputs)
        sizes = (place.in_features, place.num_experts, place.num_blocks)
        self.lines.append(
            f"linear {dict(place.parts)} {sizes} {flags} {place.is_transposed} {outputs} {inputs}"
        )
        return None


def parts_of(spec: ModelSpec) -> Iterator[tuple[str, ModelSpec]]:
    """Yield the whole model, each of two ranks' parts, and each of two stages."""
    yield "whole", spec
    for index in range(2):
        try:
            yield f"rank {index}", shard(spec, TensorShard(index, 2))
        except ConfigError:
            continue  # two ranks cannot share this model
    for index in range(2):
        try:
            yield f"stage {index}", stage(spec, PipelineStage(index, 2))
        except ConfigError:
            continue  # two stages cannot divide this model


def digests(name: str, folder: Path) -> dict[str, str]:
    """Return a digest of the requests for each part of a family's model."""
    CASES[name].save(folder)
    found = {}
    for part, spec in parts_of(read_config(folder)):
        requests = Requests()
        build_parameters(spec, requests)
        found[part] = hashlib.sha256("\n".join(requests.lines).encode()).hexdigest()[:16]
    return found


@pytest.mark.parametrize("name", case.parameters(CASES, QUICK))
def test_packed_weights_of_before_are_read_in_their_order(name: str, tmp_path: Path) -> None:
    assert digests(name, tmp_path) == json.loads(RECORDED.read_text())[name]


if __name__ == "__main__":
    found = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found[name] = digests(name, Path(folder))
    lines = (f"{json.dumps(name)}: {json.dumps(of_case)}" for name, of_case in found.items())
    RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")
