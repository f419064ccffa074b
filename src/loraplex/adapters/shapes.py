"""What an adapter is checked against: the linear layers of a base model."""

import msgspec


class BaseShapes(msgspec.Struct, frozen=True):
    num_layers: int
    modules: dict[str, tuple[int, int]]
    """(in_features, out_features) of every linear layer of a decoder layer that may be adapted."""
