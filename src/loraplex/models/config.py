"""What a decoder is: sizes and options, free of torch, of file formats and of weights."""

import dataclasses
import itertools
from collections.abc import Sequence

from loraplex.models.decoder_names import LLAMA_NAMES, DecoderNames


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields that the rope type does not use keep their defaults.

    The names are those of Hugging Face configurations; models.rope has the formulas.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    partial_rotary_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder with norms before attention and MLP. The defaults are Llama's."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig | None
    """None: positions are learned, one vector for each of max_position_embeddings."""
    layer_windows: tuple[int | None, ...]
    """Per layer: how many positions, its own included, a token sees; None is all before it."""
    num_sink_tokens: int = 0
    """In layers with a window, so many first positions are seen, too."""
    norm_bias: bool = False
    """With one the norms of layers are layer norms, else RMS norms."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm of each query and key head before the rotation."""
    tie_word_embeddings: bool = False
    hidden_act: str = "silu"
    """By Hugging Face's name; of the gate, if there is one."""
    names: DecoderNames = LLAMA_NAMES
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    dtype: str | None = None
    """The checkpoint's own, by torch's name, or None if config.json does not say."""

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def has_gate(self) -> bool:
        """Whether the MLP has one."""
        return len(self.names.up) > 1

    @property
    def attention_window(self) -> int | None:
        """The largest of the layers': what no layer sees any more can be given up."""
        windows = [window for window in self.layer_windows if window is not None]
        return max(windows) if len(windows) == self.num_layers else None

    @property
    def default_max_model_len(self) -> int:
        """The length that the model was made for.

        Llama 3 and longrope checkpoints tell the stretched length; the others tell the original
        one and the factor.
        """
        rope = self.rope
        if rope is None:
            return self.max_position_embeddings
        if rope.rope_type in ("linear", "dynamic"):
            return int(self.max_position_embeddings * rope.factor)
        if rope.rope_type == "yarn":
            stretched = int(rope.original_max_position_embeddings * rope.factor)
            return max(stretched, self.max_position_embeddings)
        return self.max_position_embeddings


def with_attention_windows(
    config: DecoderConfig, max_windows: Sequence[int], num_sink_tokens: int
) -> DecoderConfig:
    """The layers see less: layer i at most max_windows[i % len] positions, and the sinks.

    max_windows may be empty. A layer's own window stays where it is smaller.
    """
    windows = config.layer_windows
    if max_windows:
        windows = tuple(
            limit if window is None else min(window, limit)
            for window, limit in zip(windows, itertools.cycle(max_windows), strict=False)
        )
    return dataclasses.replace(config, layer_windows=windows, num_sink_tokens=num_sink_tokens)
