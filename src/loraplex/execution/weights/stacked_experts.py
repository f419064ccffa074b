"""Tensors of a checkpoint that hold a weight, or a bias, of all experts of a layer.

They are served as one tensor per expert: views, which copy nothing.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch

from loraplex.models.decoder_names import StackedExperts
from loraplex.models.spec import ModelSpec


@dataclasses.dataclass(frozen=True, slots=True)
class StackedTensor:
    """One of these tensors, as the configuration means it."""

    name: str
    """Full name."""
    form: StackedExperts
    prefix: str
    """Prefix of the names of the layer's parts."""
    num_experts: int
    sizes: tuple[int, ...]
    """Outputs of each part."""
    in_features: tuple[int, ...]
    """Inputs of a weight; empty for biases."""

    def parts(self) -> Iterator[tuple[str, "StackedPart"]]:
        """Yield the tensors that are in it, with their full names."""
        for expert in range(self.num_experts):
            for number, part in enumerate(self.form.parts):
                yield self.prefix + part.format(expert=expert), StackedPart(self, expert, number)

    @property
    def has_two_readings(self) -> bool:
        """Whether the shape leaves open which of its axes are the outputs."""
        return self.form.is_transposed is None and (sum(self.sizes),) == self.in_features

    def is_transposed(self, shape: torch.Size) -> bool:
        """Whether a tensor of this shape, which has one reading, is [experts, in, out]."""
        if self.form.is_transposed is not None:
            return self.form.is_transposed and bool(self.in_features)
        return shape == self.shape(is_transposed=True) != self.shape(is_transposed=False)

    def shape(self, *, is_transposed: bool) -> tuple[int, ...]:
        features = (sum(self.sizes), *self.in_features)
        return (self.num_experts, *(features[::-1] if is_transposed else features))


class StackedPart(NamedTuple):
    """Tensor of one expert within a tensor of all."""

    whole: StackedTensor
    expert: int
    number: int
    """Place of the part among those of an expert."""

    def view(self, tensor: torch.Tensor, *, is_transposed: bool) -> torch.Tensor:
        """Return the part of the whole tensor: [out, in], or a bias [out]."""
        rows = tensor[self.expert].T if is_transposed else tensor[self.expert]
        sizes = self.whole.sizes
        if self.whole.form.is_interleaved:
            return rows[self.number :: len(sizes)]
        first = sum(sizes[: self.number])
        return rows[first : first + sizes[self.number]]


def stacked_tensors(
    spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]
) -> Mapping[str, StackedTensor]:
    """Return those that a checkpoint may have, by full name. shapes: of each expert's tensors."""
    found: dict[str, StackedTensor] = {}
    for index, layer in enumerate(spec.layers):
        routing = None if layer.feed_forward is None else layer.feed_forward.routing
        prefix = spec.names.layer(index)
        for form in spec.names.experts.stacked_forms if routing else ():
            first_parts = [shapes.get(prefix + part.format(expert=0)) for part in form.parts]
            if routing is None or None in first_parts:
                continue  # biases, in a model without
            sizes, inputs = zip(*((part[0], part[1:]) for part in first_parts if part), strict=True)
            name = prefix + form.tensor
            tensor = StackedTensor(name, form, prefix, routing.num_experts, sizes, inputs[0])
            found |= {name: tensor, f"{name}.weight": tensor}
    return found
