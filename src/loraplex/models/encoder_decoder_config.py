"""Layers of encoder-decoder models: what T5 and BART with their relatives have in common."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Final

from loraplex.core.errors import ConfigError
from loraplex.models.config_fields import ConfigFields
from loraplex.models.family_config import UP_PARTS
from loraplex.models.linear_group import LinearGroup
from loraplex.models.spec import DOWN, UP, FeedForwardSpec, LayerSpec, NormPlace
from loraplex.models.specs.attention import OUTPUT, QKV, AttentionSpec
from loraplex.models.specs.cross import CROSS_KV, CROSS_OUTPUT, CROSS_QUERY, CrossSpec
from loraplex.models.specs.part import NormSpec

ENCODER: Final = "encoder."
CROSS: Final = "cross_attn."
"""How names of modules begin in adapters: of the encoder, and of cross attention."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackNames:
    """Names of a layer's parts in a stack, within the layer, and of its modules in adapters."""

    attention: str
    attention_norm: str
    cross: str
    """Cross attention, which a decoder's layers have."""
    cross_norm: str
    projections: tuple[str, str, str, str]
    """Queries, keys, values and output, of both kinds of attention."""
    output_module: str
    up: tuple[str, ...]
    """Two with a gate, else one."""
    down: str
    up_modules: tuple[str, ...]
    down_module: str
    feed_forward_norm: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """Layers of one stack, which differ in their names alone. That of a decoder is causal."""

    names: StackNames
    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    norm: NormSpec
    """Norm of all parts; each gets a path."""
    has_biases: bool

    @property
    def cross(self) -> CrossSpec | None:
        """Return a decoder's attention to the encoder: as many heads as that to its own text."""
        own = self.attention
        if not own.is_causal:
            return None
        scale = own.head_dim**-0.5 if own.scale is None else own.scale
        return CrossSpec(num_heads=own.num_heads, head_dim=own.head_dim, scale=scale)

    def layer(self, prefix: str, attention: AttentionSpec | None = None) -> LayerSpec:
        """Return the layer whose names begin with the prefix. attention: None: the usual one."""
        names, size, attention = self.names, self.norm.size, attention or self.attention
        inner = self.feed_forward.inner_size
        up_parts = UP_PARTS[not self.feed_forward.is_gated :]
        linears = {
            **self._attention(prefix, attention.q_size),
            UP: dataclasses.replace(
                self._group([prefix + name for name in names.up], names.up_modules, inner, size),
                parts=dict.fromkeys(up_parts, inner),
            ),
            DOWN: self._row_group([prefix + names.down], names.down_module, size, inner),
        }
        norms = {
            NormPlace.BEFORE_MIXER: names.attention_norm,
            NormPlace.BEFORE_FEED_FORWARD: names.feed_forward_norm,
        }
        cross = self.cross
        if cross is not None:
            linears |= self._cross(prefix, cross)
            norms[NormPlace.BEFORE_CROSS] = names.cross_norm
        return LayerSpec(
            mixer=attention,
            cross=cross,
            feed_forward=self.feed_forward,
            norms={
                place: dataclasses.replace(self.norm, path=prefix + name)
                for place, name in norms.items()
            },
            linears=linears,
        )

    def _attention(self, prefix: str, inner: int) -> Mapping[str, LinearGroup]:
        q, k, v, o = (f"{prefix}{self.names.attention}.{name}" for name in self.names.projections)
        size = self.norm.size
        qkv = self._group([q, k, v], ("q_proj", "k_proj", "v_proj"), inner, size)
        return {
            QKV: dataclasses.replace(
                qkv, parts=dict(qkv.outputs), head_dim=self.attention.head_dim
            ),
            OUTPUT: self._row_group([o], self.names.output_module, size, inner),
        }

    def _cross(self, prefix: str, cross: CrossSpec) -> Mapping[str, LinearGroup]:
        q, k, v, o = (f"{prefix}{self.names.cross}.{name}" for name in self.names.projections)
        size, inner = self.norm.size, cross.size
        output = CROSS + self.names.output_module
        return {
            CROSS_QUERY: self._group([q], (f"{CROSS}q_proj",), inner, size),
            CROSS_KV: self._group([k, v], (f"{CROSS}k_proj", f"{CROSS}v_proj"), inner, size),
            CROSS_OUTPUT: self._row_group([o], output, size, inner),
        }

    def _group(
        self, paths: Sequence[str], modules: Sequence[str], out_features: int, in_features: int
    ) -> LinearGroup:
        prefix = "" if self.attention.is_causal else ENCODER
        return LinearGroup(
            paths=tuple(paths),
            outputs={prefix + module: out_features for module in modules},
            in_features=in_features,
            has_bias=self.has_biases,
        )

    def _row_group(
        self, paths: Sequence[str], module: str, out_features: int, in_features: int
    ) -> LinearGroup:
        group = self._group(paths, (module,), out_features, in_features)
        return dataclasses.replace(group, is_row=True)


def read_first_ids(
    fields: ConfigFields, vocab_size: int, start: int, bos: int | None = None
) -> tuple[int, ...]:
    """Read which tokens every output begins with; start, bos: those of files without the fields.

    Raises ConfigError for a token that is not in the vocabulary.
    """
    defaults = {"decoder_start_token_id": start, "forced_bos_token_id": bos}
    found = []
    for name, default in defaults.items():
        stated = fields.optional_integer(name)
        token_id = default if stated is None else stated
        if stated is not None and not 0 <= stated < vocab_size:
            raise ConfigError(
                f"{fields.source}: {name} must be a token of the vocabulary of {vocab_size}, "
                f"got {stated}"
            )
        if token_id is not None:
            found.append(token_id)
    return tuple(found)
