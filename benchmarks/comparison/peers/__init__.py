"""Other people's servers and libraries, at the places that the user gives."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from comparison.peers.llama_cpp import LlamaCpp
from comparison.peers.openvino import OpenVinoGenAI
from comparison.peers.places import venv_python
from comparison.peers.transformers import TransformersPeft
from comparison.peers.vllm import VllmCpu
from comparison.systems import System
from loraplex.core.errors import ConfigError


def _transformers(name: str, place: Path, _weights: Sequence[str]) -> list[System]:
    return [TransformersPeft(venv_python(name, place))]


def _vllm(name: str, place: Path, _weights: Sequence[str]) -> list[System]:
    return [VllmCpu(venv_python(name, place), weight_bits) for weight_bits in (32, 16)]


def _llama_cpp(_name: str, place: Path, weights: Sequence[str]) -> list[System]:
    return [LlamaCpp(place, each) for each in weights]


def _openvino(name: str, place: Path, _weights: Sequence[str]) -> list[System]:
    return [OpenVinoGenAI(venv_python(name, place), weight_bits) for weight_bits in (32, 16, 8)]


_PEERS: dict[str, Callable[[str, Path, Sequence[str]], list[System]]] = {
    "transformers": _transformers,
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
    "openvino": _openvino,
}
PEERS = tuple(_PEERS)
"""The known names."""


def peers(places: Mapping[str, Path], weights: Sequence[str]) -> list[System]:
    """A system for each of these weights that a peer has, by name and place.

    A place is a virtual environment (its folder or its Python); that of llama.cpp is its source
    folder with the server built in it. Raises ConfigError for an unknown name, and for a place
    that lacks what it should hold.
    """
    systems: list[System] = []
    for name, place in places.items():
        if name not in _PEERS:
            raise ConfigError(f"no peer is named {name}; known: {', '.join(PEERS)}")
        systems += _PEERS[name](name, place, weights)
    return [system for system in systems if system.weights in weights]
