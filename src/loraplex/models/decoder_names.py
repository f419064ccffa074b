"""What a family's checkpoints and adapters call the parts of a decoder. Free of torch."""

import dataclasses
import re
from typing import Final


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderNames:
    """Names of modules, without .weight and .bias. Those of a layer's parts are within the layer.

    The defaults are Llama's.
    """

    root: str = "model."
    """What all names but the lm_head's begin with. Checkpoints of a decoder alone leave it out."""
    embedding: str = "embed_tokens"
    positions: str = ""
    """The table of learned positions, where there is one."""
    layers: str = "layers"
    input_norm: str = "input_layernorm"
    post_attention_norm: str = "post_attention_layernorm"
    final_norm: str = "norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Layers of one input whose outputs lie side by side; here one for each, or one for all."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """With a gate two, without one."""
    down: str = "mlp.down_proj"
    lm_head: str = "lm_head"
    buffers: str = r".*rotary_emb\.inv_freq"
    """A regular expression: tensors of old checkpoints that can be worked out."""
    has_transposed_weights: bool = False
    """Linear layers of the decoder layers are stored [in, out], as transformers' Conv1D."""

    def layer(self, index: int) -> str:
        """What the names of a layer's parts begin with."""
        return f"{self.root}{self.layers}.{index}."

    def module(self, path: str) -> str:
        """What adapters' targets call a linear layer: its last name if no other layer has it."""
        paths = (*self.qkv, self.o, *self.up, self.down)
        names = [_last(other) for other in paths]
        return _last(path) if len(set(names)) == len(names) else path

    def canonical(self, tensor: str) -> str | None:
        """The full name of a checkpoint's tensor; None for one that is not needed."""
        if re.fullmatch(self.buffers, tensor):
            return None
        bare = tensor.removeprefix(self.root)
        firsts = (self.embedding, self.positions, self.layers, self.final_norm)
        return self.root + bare if bare.split(".")[0] in firsts else tensor


LLAMA_NAMES: Final = DecoderNames()


def _last(path: str) -> str:
    return path.rpartition(".")[2]
