"""docs/models.md, made from the registry of architectures and the families' own descriptions."""

import inspect
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from loraplex.models.config_fields import ConfigFields
from loraplex.models.registry import ARCHITECTURES
from loraplex.models.spec import ModelSpec
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.latent import LatentSpec

_ABOUT: Final = Path(__file__).with_name("models_about.md")
_TABLE: Final = "<!-- tables -->"
_CONSTRAINTS: Final = Path(__file__).parents[2] / "constraints.txt"
_NUM_LAYERS: Final = 8
_SIZES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        **dict.fromkeys(("hidden_size", "n_embd"), 64),
        **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 96),
        **dict.fromkeys(("num_attention_heads", "n_head"), 4),
        **dict.fromkeys(("num_hidden_layers", "n_layer"), _NUM_LAYERS),
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "rotary_dim": 8,
        "shared_intermediate_size": 48,
        "sliding_window": 16,
        "use_sliding_window": True,
        "max_window_layers": 4,
        "full_attn_idxs": [2, 5],
    }
)
"""Small model by the names of every family."""
_OWN_FIELDS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
        "BambaForCausalLM": {"attn_layer_indices": [3]},
        "NemotronHForCausalLM": {"hybrid_override_pattern": "ME*-" * (_NUM_LAYERS // 4)},
        "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"] * (_NUM_LAYERS // 2)},
    }
)
"""Fields that a family requires, or without which its layers are all of one kind."""


def models_page() -> str:
    """Return models_about.md with the table of families in the marked place."""
    about = _ABOUT.read_text(encoding="utf-8").replace("VERSION", _tested_version())
    return about.replace(_TABLE, "\n".join(_table()))


def _tested_version() -> str:
    found = re.search(r"^transformers==(\S+)", _CONSTRAINTS.read_text(encoding="utf-8"), re.M)
    assert found is not None
    return found[1]


def _table() -> Iterator[str]:
    yield "| family | architecture | LoRA modules | positions | windows |"
    yield "|---|---|---|---|---|"
    for architecture, read in ARCHITECTURES.items():
        description = inspect.getdoc(sys.modules[read.__module__]) or ""
        family = description.partition(":")[0]
        spec = _spec(architecture)
        names = dict.fromkeys(itertools.chain.from_iterable(spec.module_shapes))
        modules = ", ".join(f"`{name}`" for name in names)
        cells = (family, f"`{architecture}`", modules, _positions(spec), _windows(spec))
        yield f"| {' | '.join(cells)} |"


def _spec(architecture: str) -> ModelSpec:
    sizes = {**_SIZES, **_OWN_FIELDS.get(architecture, {})}
    fields = {**sizes, "architectures": [architecture], "text_config": sizes}
    return ARCHITECTURES[architecture](ConfigFields(fields, architecture))


def _positions(spec: ModelSpec) -> str:
    if spec.has_position_table:
        return "sines" if spec.sinusoid_step else "learned"
    mixers = list(spec.mixers_of(AttentionSpec))
    ropes = [attention.rope for attention in mixers]
    ropes += [attention.rope for attention in spec.mixers_of(LatentSpec)]
    rotating = next((rope for rope in ropes if rope is not None), None)
    if rotating is None and any(attention.position_bias for attention in mixers):
        return "biases by distance"
    if rotating is None:
        return "ALiBi" if any(attention.alibi_slopes for attention in mixers) else "none"
    part = rotating.rotary_dim(1000) / 1000
    kind = "rotary in pairs" if rotating.is_interleaved else "rotary"
    kind += f", {part:.3g} of a head" if part < 1 else ""
    return kind if None not in ropes else f"{kind}, not in every layer"


def _windows(spec: ModelSpec) -> str:
    windows = [each.window or each.chunk for each in spec.mixers_of(AttentionSpec)]
    num_windowed = sum(window is not None for window in windows)
    return {len(windows): "all layers", 0: "none"}.get(num_windowed, "some layers")
