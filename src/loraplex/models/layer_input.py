"""Own inputs of layers: a vector of each token for each layer (Gemma 4).

Of a token whose embedding is e [N], layer l of L layers gets the vector p_l [P]:

    p = 2 ** -1/2 * (norm(W e * N ** -1/2) + sqrt(P) * table[token])

where p [L * P] holds the vectors of all layers, and the norm is of each of them. The layer adds
norm(W_out (activation(W_gate h) * p_l)) to its hidden state h.
"""

import math

import torch

from loraplex.kernels.activations import Activation
from loraplex.kernels.lora import LoraBatch
from loraplex.kernels.ops import Kernels
from loraplex.models.mixers.mixer import LayerPlace, Linear, MixerInputs
from loraplex.models.parameters import LayerInputParameters, LayerParameters, layer_input_norm
from loraplex.models.spec import LAYER_INPUT_GATE, LAYER_INPUT_OUT, ModelSpec


class LayerInputs:
    """Gives the vectors of all layers, once a step."""

    def __init__(
        self,
        spec: ModelSpec,
        parameters: LayerInputParameters,
        projection: Linear,
        kernels: Kernels,
    ) -> None:
        """parameters: packed by these kernels. projection: LAYER_INPUTS of the first layer."""
        self._kernels = kernels
        self._table, self._projection = parameters.table, projection
        self._size = spec.layer_input_size
        # Factors before and after the norm go into its epsilon and its weight, so fewer results
        # are rounded.
        self._eps = layer_input_norm(spec).eps * spec.hidden_size
        self._weight = parameters.norm.weight.float() * math.sqrt(0.5)
        # The model rounds the table's factor to its type.
        factor = torch.tensor(math.sqrt(self._size), dtype=self._table.dtype)
        self._table_factor = factor.item() * math.sqrt(0.5)

    def of_tokens(
        self, embedded: torch.Tensor, token_ids: torch.Tensor, lora: LoraBatch | None
    ) -> torch.Tensor:
        """embedded [T, N], token_ids [T] -> [T, L * P]."""
        projected = self._projection.forward(embedded, lora)
        normed = self._kernels.rms_norm(projected.view(-1, self._size), self._weight, self._eps)
        rows = self._kernels.take_rows(self._table, token_ids)
        return self._kernels.add(rows, normed.view(rows.shape), self._table_factor)


class LayerInput:
    """Implements `Part`: what a layer adds of its own input."""

    def __init__(
        self,
        activation: Activation,
        place: LayerPlace,
        parameters: LayerParameters,
        kernels: Kernels,
    ) -> None:
        self._kernels = kernels
        self._activation = activation
        self._gate = place.linear(LAYER_INPUT_GATE, parameters, kernels)
        self._output = place.linear(LAYER_INPUT_OUT, parameters, kernels)
        size = place.linears[LAYER_INPUT_OUT].in_features
        self._columns = slice(place.layer * size, (place.layer + 1) * size)

    def forward(self, x: torch.Tensor, lora: LoraBatch | None, inputs: MixerInputs) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]."""
        assert inputs.layer_inputs is not None
        gate = self._kernels.activate(self._gate.forward(x, lora), self._activation)
        own = self._kernels.multiply(gate, inputs.layer_inputs[:, self._columns])
        return self._output.forward(own, lora)
