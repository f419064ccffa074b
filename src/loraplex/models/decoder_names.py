"""Names of a decoder's parts in a family's checkpoints and adapters. Free of torch."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Final

from loraplex.core.module_names import without_wrappers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """One tensor of a checkpoint that has a weight, or a bias, of all experts."""

    tensor: str
    """Name within the layer. A checkpoint may add .weight."""
    parts: tuple[str, ...]
    """Names of the tensors of an expert that are in it, in the order of their outputs."""
    is_transposed: bool | None = None
    """Whether it is [experts, in, out] and not [experts, out, in]; None: by its shape."""
    is_interleaved: bool = False
    """Whether output i of part j of n parts is output n * i + j."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of what a layer with experts has, within the layer; {expert} stands for the number.

    The defaults are those of Qwen and OLMoE.
    """

    router: str = "mlp.gate"
    up: tuple[str, ...] = (
        "mlp.experts.{expert}.gate_proj",
        "mlp.experts.{expert}.up_proj",
    )
    down: str = "mlp.experts.{expert}.down_proj"
    latent: tuple[str, ...] = ()
    """Linear layers from the hidden size to that of the experts, and back, where they differ."""
    shared_up: tuple[str, ...] = ()
    """Names of a shared expert's parts, if there is one."""
    shared_down: str = ""
    shared_gate: str = ""
    selection_bias: str = ""
    is_selection_bias_row: bool = False
    """Whether the tensor is [1, num_experts]."""
    stacked: tuple[StackedExperts, ...] = ()
    """Tensors of all experts that checkpoints may have, in addition to those of transformers 5."""

    @property
    def stacked_forms(self) -> tuple[StackedExperts, ...]:
        """Tensors of all experts that checkpoints may have instead of one for each."""
        parent = self.down.partition(".{expert}")[0]
        up, down = (f"{parent}.{name}" for name in ("gate_up_proj", "down_proj"))
        own = {form.tensor for form in self.stacked}
        forms = (
            StackedExperts(tensor=up, parts=tuple(f"{part}.weight" for part in self.up)),
            StackedExperts(tensor=down, parts=(f"{self.down}.weight",)),
            # Of GGUF files, which have one for each projection.
            *(
                StackedExperts(tensor=part.replace(".{expert}", ""), parts=(f"{part}.weight",))
                for part in self.up
            ),
        )
        return (*self.stacked, *(form for form in forms if form.tensor not in own))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderNames:
    """Names of modules, without .weight and .bias. Those of a layer's parts are within the layer.

    The defaults are Llama's.
    """

    root: str = "model."
    """Prefix of all names but those of heads. Checkpoints of a decoder alone leave it out."""
    other_roots: tuple[str, ...] = ()
    """Prefixes that some checkpoints have instead, such as those of a multimodal wrapper."""
    embedding: str = "embed_tokens"
    embedding_projections: tuple[str, ...] = ()
    """Linear layers from the embedding's size to the hidden one and back, where they differ."""
    positions: str = ""
    """Table of learned positions, where there is one."""
    layer_inputs: tuple[str, ...] = ()
    """Table, projection and norm of the layers' own inputs, where there are such."""
    layers: str = "layers"
    embedding_norm: str = ""
    input_norm: str = "input_layernorm"
    """Norm before attention. A norm with an empty name is none."""
    attention_output_norm: str = ""
    feed_forward_norm: str = "post_attention_layernorm"
    """Norm before the feed-forward part."""
    feed_forward_output_norm: str = ""
    final_norm: str = "norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Layers with one input whose outputs lie side by side: three, or a fused one."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Two with a gate, else one."""
    down: str = "mlp.down_proj"
    experts: ExpertNames = ExpertNames()
    other_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """How names within a layer begin, by how they do in some checkpoints instead."""
    lm_head: str = "lm_head"
    score: str = "score"
    """Classification head."""
    other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The names above by those that some checkpoints have instead, for parts outside the layers."""
    ignored: str = r".*rotary_emb\.inv_freq"
    """Regular expression for tensors that are not needed: those that can be computed."""
    has_transposed_weights: bool = False
    """Whether linear layers of decoder layers are stored [in, out], like transformers' Conv1D."""

    def layer(self, index: int | str) -> str:
        """Return the prefix of the names of a layer's parts."""
        return f"{self.root}{self.layers}.{index}."

    def module(self, path: str) -> str:
        """Return a linear layer's name in adapters: the last part if no other layer has it."""
        paths = (*self.qkv, self.o, *self.up, self.down)
        names = [_last(other) for other in paths]
        return _last(path) if len(set(names)) == len(names) else path

    def canonical(self, tensor: str) -> str | None:
        """Return the full name of a checkpoint's tensor; None for one that is not needed."""
        tensor = without_wrappers(tensor)
        if re.fullmatch(self.ignored, tensor):
            return None
        firsts = (
            *(self.embedding, self.embedding_norm, self.positions, self.layers),
            *(*self.embedding_projections, *self.layer_inputs),
            *(self.final_norm, self.lm_head, self.score),
        )
        for root in (*self.other_roots, self.root, ""):
            bare = tensor.removeprefix(root)
            first = bare.split(".")[0]
            own = self.other_names.get(first, first)
            if tensor.startswith(root) and own in firsts:
                bare = own + bare.removeprefix(first)
                if own == self.layers:
                    bare = self._with_own_part(bare)
                return bare if own in (self.lm_head, self.score) else self.root + bare
        return tensor

    def outer_paths(self, name: str) -> tuple[str, ...]:
        """Return the paths that checkpoints may have for a part outside the layers."""
        names = (name, *(other for other, own in self.other_names.items() if own == name))
        roots = (self.root, *self.other_roots, "")
        return tuple(root + other for other in names for root in roots)

    def _with_own_part(self, name: str) -> str:
        """Return a name that begins with layers, whose part may be one of other_parts."""
        first, index, part = (*name.split(".", 2), "", "")[:3]
        for other, own in self.other_parts.items():
            if part.startswith(other):
                return f"{first}.{index}.{own}{part.removeprefix(other)}"
        return name


LLAMA_NAMES: Final = DecoderNames()


def _last(path: str) -> str:
    return path.rpartition(".")[2]
