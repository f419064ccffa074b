"""Size and architecture of a base model, read from its name.

Equal shapes do not make two models the same: Mistral-7B and Llama-3-8B have them. A name proves
nothing where it has no size and no family, so such names are never another kind.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

_SIZE: Final = re.compile(r"(?<![a-z0-9.])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])")
"""8b, 1.5b, 360m, 8x7b; not the active part of 30b-a3b."""
_MILLIONS: Final = MappingProxyType({"b": 1000.0, "m": 1.0})
_SAME_SIZE: Final = 0.02
_HUB_CACHE: Final = re.compile(r"(?:^|/)models--([^/]+)/snapshots/")

_CLASSES: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        r"llama": ("llama",),
        r"ministral|mistral": ("mistral", "ministral"),
        r"mixtral": ("mixtral",),
        r"qwen": ("qwen",),
        r"gemma": ("gemma",),
        r"(?<![a-z])phi(?![a-z])": ("phi", "llama"),
        r"granite": ("granite", "llama"),
        r"olmo": ("olmo",),
        r"(?<![a-z])(?:chat)?glm(?![a-z])": ("glm", "chatglm"),
        r"falcon": ("falcon", "llama"),
        r"starcoder": ("starcoder", "gptbigcode"),
        r"internlm": ("internlm", "llama"),
        r"smollm": ("smollm", "llama"),
        r"baichuan": ("baichuan",),
        r"pythia": ("gptneox",),
        r"bloom": ("bloom",),
        r"(?<![a-z])opt(?![a-z])": ("opt",),
    }
)
"""Patterns of families in names, with the beginnings of their classes in transformers. Some
families have checkpoints in Llama's form."""


def model_name(path: str) -> str:
    """Return the part of a path or a hub id that names the model, in lower case."""
    if cached := _HUB_CACHE.search(path):
        return cached[1].rpartition("--")[2].casefold()
    return path.rstrip("/").rpartition("/")[2].casefold()


def another_kind(trained_on: str, base_model: str, architecture: str) -> str:
    """Return how the name of an adapter's base contradicts the served model; empty: it does not.

    architecture: name of the served model's class, such as LlamaForCausalLM; empty if unknown.
    """
    theirs, ours = model_name(trained_on), model_name(base_model)
    sizes, own_sizes = _sizes(theirs), _sizes(ours)
    if sizes and own_sizes and not any(_is_same(a, b) for a in sizes for b in own_sizes):
        return "of another size"
    families = [classes for pattern, classes in _CLASSES.items() if re.search(pattern, theirs)]
    name = architecture.lower()
    if name and families and not any(name.startswith(classes) for classes in families):
        return f"of another architecture than {architecture}"
    return ""


def _sizes(name: str) -> list[float]:
    """Return the sizes in a name, in millions of parameters."""
    found = _SIZE.findall(name)
    return [int(times or 1) * float(number) * _MILLIONS[unit] for times, number, unit in found]


def _is_same(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_SIZE * max(one, other)
