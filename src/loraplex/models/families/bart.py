"""BART, mBART, M2M100, NLLB, Marian: an encoder and a decoder with layer norms and positions."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from loraplex.models.config_fields import ConfigFields
from loraplex.models.decoder_names import DecoderNames
from loraplex.models.encoder_decoder_config import Stack, StackNames, read_first_ids
from loraplex.models.family_config import (
    LAYER_NORM,
    check_heads,
    read_activation,
    read_dtype,
    require_switches,
)
from loraplex.models.spec import EncoderSpec, FeedForwardSpec, LayerSpec, ModelSpec, NormPlace
from loraplex.models.specs.attention import AttentionSpec
from loraplex.models.specs.part import NormSpec

ARCHITECTURE: Final = "BartForConditionalGeneration"
ARCHITECTURE_MBART: Final = "MBartForConditionalGeneration"
ARCHITECTURE_M2M100: Final = "M2M100ForConditionalGeneration"
ARCHITECTURE_MARIAN: Final = "MarianMTModel"

NAMES: Final = DecoderNames(
    root="model.decoder.",
    other_roots=("model.",),
    positions="embed_positions",
    embedding_norm="layernorm_embedding",
    final_norm="layer_norm",
    other_names={"shared": "embed_tokens"},
    # Copies of the embedding, and numbers of fairseq's versions.
    ignored=r"(model\.)?(encoder|decoder)\.(embed_tokens\.weight|version)",
)
_COMPUTED: Final = dataclasses.replace(
    NAMES, ignored=rf"{NAMES.ignored}|(model\.)?(encoder|decoder)\.embed_positions\.weights?"
)
_STACK_NAMES: Final = StackNames(
    attention="self_attn",
    attention_norm="self_attn_layer_norm",
    cross="encoder_attn",
    cross_norm="encoder_attn_layer_norm",
    projections=("q_proj", "k_proj", "v_proj", "out_proj"),
    output_module="out_proj",
    up=("fc1",),
    down="fc2",
    up_modules=("fc1",),
    down_module="fc2",
    feed_forward_norm="final_layer_norm",
)
_PARTS: Final = (NormPlace.BEFORE_MIXER, NormPlace.BEFORE_CROSS, NormPlace.BEFORE_FEED_FORWARD)
_NEEDED: Final = {"share_encoder_decoder_embeddings": True, "tie_word_embeddings": True}

_Layers = tuple[tuple[LayerSpec, ...], NormSpec]
"""Layers of a stack, and the norm after the last one."""


class _Form(NamedTuple):
    """Differences between the families."""

    architecture: str
    norms_follow: bool
    """Whether norms follow the parts and replace the residual."""
    norms_embedding: bool
    offset: int
    """Row of the position table that belongs to position 0."""
    sinusoid_step: Callable[[int], float] | None
    """ModelSpec.sinusoid_step by the hidden size; None: positions are stored."""
    has_logits_bias: bool
    activation: str
    """Name of the activation in files without one."""
    start: int
    pad: int


def read_config(fields: ConfigFields) -> ModelSpec:
    form = _Form(ARCHITECTURE, True, True, 2, None, True, "gelu", 2, 1)
    return _read(fields, form)


def read_config_mbart(fields: ConfigFields) -> ModelSpec:
    form = _Form(ARCHITECTURE_MBART, False, True, 2, None, True, "gelu", 2, 1)
    return _read(fields, form)


def read_config_m2m100(fields: ConfigFields) -> ModelSpec:
    form = _Form(
        *(ARCHITECTURE_M2M100, False, False, 2), lambda size: size // 2 - 1, False, "relu", 2, 1
    )
    return _read(fields, form)


def read_config_marian(fields: ConfigFields) -> ModelSpec:
    """Read Marian, whose outputs begin with the padding token, which is none of them."""
    form = _Form(
        *(ARCHITECTURE_MARIAN, True, False, 0), lambda size: size / 2, True, "gelu", 58100, 58100
    )
    return _read(fields, form)


def _read(fields: ConfigFields, form: _Form) -> ModelSpec:
    require_switches(fields, _NEEDED)
    fields = fields.renamed({"hidden_act": "activation_function"}, {"hidden_act": form.activation})
    hidden = fields.integer("d_model", 1024)
    norm = dataclasses.replace(LAYER_NORM, size=hidden)
    path = "model.{}.layernorm_embedding"
    embedding = {
        name: dataclasses.replace(norm, path=path.format(name)) if form.norms_embedding else None
        for name in ("encoder", "decoder")
    }
    is_marian = form.architecture == ARCHITECTURE_MARIAN
    stacks = {name: _layers(fields, name, norm, form, first) for name, first in embedding.items()}
    if form.norms_follow:
        embedding = {}  # it is the first layer's
    positions = fields.integer("max_position_embeddings", 1024)
    pad = fields.optional_integer("pad_token_id")
    pad = form.pad if pad is None else pad
    vocab_size = fields.integer("vocab_size")
    return ModelSpec(
        architecture=form.architecture,
        hidden_size=hidden,
        vocab_size=vocab_size,
        layers=stacks["decoder"][0],
        final_norm=stacks["decoder"][1],
        names=NAMES if form.sinusoid_step is None else _COMPUTED,
        max_position_embeddings=positions,
        default_max_model_len=positions,
        hidden_act=fields.text("hidden_act", form.activation),
        embedding_factor=hidden**0.5 if fields.boolean("scale_embedding", False) else 1.0,
        embedding_norm=embedding.get("decoder"),
        is_embedding_norm_last=True,
        has_position_table=True,
        position_offset=form.offset,
        sinusoid_step=0.0 if form.sinusoid_step is None else form.sinusoid_step(hidden),
        tie_word_embeddings=True,
        logits_bias="final_logits_bias" if form.has_logits_bias else "",
        eos_token_ids=fields.integers("eos_token_id"),
        bos_token_id=fields.optional_integer("bos_token_id"),
        pad_token_id=pad,
        dtype=read_dtype(fields),
        encoder=EncoderSpec(
            longest_input=positions,
            layers=stacks["encoder"][0],
            final_norm=stacks["encoder"][1],
            embedding_norm=embedding.get("encoder"),
            positions="" if form.sinusoid_step else "model.encoder.embed_positions",
            layer_prefix="model.encoder.layers.{}.",
            first_ids=read_first_ids(fields, vocab_size, pad if is_marian else form.start),
            never_ids=(pad,) if is_marian else (),
        ),
    )


def _layers(
    fields: ConfigFields, name: str, norm: NormSpec, form: _Form, before: NormSpec | None
) -> _Layers:
    """before: norm of the embedding."""
    num_heads = fields.integer(f"{name}_attention_heads", 16)
    head_dim = norm.size // num_heads
    check_heads(fields, num_heads, num_heads, head_dim)
    stack = Stack(
        names=_STACK_NAMES,
        attention=AttentionSpec(
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            rope=None,
            is_causal=name == "decoder",
        ),
        feed_forward=FeedForwardSpec(
            inner_size=fields.integer(f"{name}_ffn_dim", 4096),
            activation=read_activation(fields),
            is_gated=False,
        ),
        norm=norm,
        has_biases=True,
    )
    count = fields.integer(f"{name}_layers", 12)
    layers = [stack.layer(f"model.{name}.layers.{index}.") for index in range(count)]
    if form.norms_follow:
        return _with_norms_after(layers, before)
    return tuple(layers), dataclasses.replace(norm, path=f"model.{name}.layer_norm")


def _with_norms_after(layers: Sequence[LayerSpec], before: NormSpec | None) -> _Layers:
    """Let each norm follow its part: it is the norm before the next part, or the final one."""
    changed = []
    for layer in layers:
        norms: dict[NormPlace, NormSpec] = {}
        for place in _PARTS:
            if place in layer.norms:
                if before is not None:
                    norms[place] = dataclasses.replace(before, replaces_residual=True)
                before = layer.norms[place]
        changed.append(dataclasses.replace(layer, norms=norms))
    assert before is not None
    return tuple(changed), dataclasses.replace(before, replaces_residual=True)
