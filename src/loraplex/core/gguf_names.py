"""Names in GGUF files: architectures, and tensors as Hugging Face's checkpoints name them.

The names are those of llama.cpp's gguf-py (gguf/constants.py).
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from loraplex.core.errors import ConfigError, UnsupportedModelError
from loraplex.core.gguf import GgufFile

ROPE_FACTORS: Final = "rope_freqs.weight"
LONG_ROPE: Final = ("rope_factors_short.weight", "rope_factors_long.weight")

END_TEXTS: Final = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|end_of_text|>", "<EOT>", "_<EOT>", "<end_of_utterance>"),
        *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<|file_sep|>"),
        *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<reponame>"),
    )
)
"""Texts of tokens that end an output whatever the file names, as in llama.cpp's llama-vocab.cpp:
converters name one end token at most, and models have several (llama.cpp#9606). Those that only
architectures have which are not supported are left out: there some of these do not end it."""

_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(\w+)")
_OUTSIDE: Final = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
}
_PARTS: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


_ROTATED: Final = tuple(f".{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias"))


class GgufFamily(NamedTuple):
    """Differences of an architecture from a plain decoder."""

    name: str
    """Value of general.architecture."""
    architectures: tuple[str, ...]
    """Names in Hugging Face's config.json; a file without one is of the first."""
    parts: Mapping[str, str] = {}
    """Names of parts of a layer, in addition to the usual ones."""
    has_permuted_heads: bool = False
    """Whether rows of queries and keys are in the order of rotations of neighbours."""
    norm_offset: float = 0.0
    """Number that is added to the weights of norms."""

    def file_rows(self, name: str, num_rows: int, head_dim: int) -> list[int] | None:
        """Return the file's row for each row of a weight; None: they are in order.

        Within a permuted head the two rows of a pair that rotates are neighbours, while Hugging
        Face has all first rows of pairs, then all second ones. name: in Hugging Face's
        checkpoints. Raises ConfigError if the rows are no whole heads.
        """
        if not self.has_permuted_heads or not name.endswith(_ROTATED):
            return None
        if num_rows % head_dim:
            raise ConfigError(f"{name} has {num_rows} rows, no multiple of {head_dim}")
        of_head = (*range(0, head_dim, 2), *range(1, head_dim, 2))
        return [start + row for start in range(0, num_rows, head_dim) for row in of_head]


FAMILIES: Final[Mapping[str, GgufFamily]] = {
    family.name: family
    for family in (
        GgufFamily(
            "llama",
            (
                *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"),
                "InternLM3ForCausalLM",
            ),
            has_permuted_heads=True,
        ),
        GgufFamily("qwen2", ("Qwen2ForCausalLM",)),
        GgufFamily("qwen3", ("Qwen3ForCausalLM",)),
        GgufFamily("gemma2", ("Gemma2ForCausalLM",), _SANDWICH, norm_offset=-1.0),
        GgufFamily(
            "gemma3",
            ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
            _SANDWICH,
            norm_offset=-1.0,
        ),
        GgufFamily("phi3", ("Phi3ForCausalLM",), {"ffn_up": "mlp.gate_up_proj"}),
    )
}


def family_of(file: GgufFile) -> GgufFamily:
    """Return the family of a file's model. Raises ConfigError, UnsupportedModelError."""
    if "general.architecture" not in file.metadata:
        raise ConfigError(f"{file.path}: metadata general.architecture is missing")
    name = str(file.metadata["general.architecture"])[:80]
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {name!r} of GGUF is not supported; "
            f"supported: {', '.join(FAMILIES)}"
        )
    return FAMILIES[name]


def hugging_face_name(file: GgufFile, tensor: str) -> str | None:
    """Return the name of a tensor in Hugging Face's checkpoints; None: config.json has it.

    Raises ConfigError for a tensor that no supported model has.
    """
    if tensor == ROPE_FACTORS or tensor in LONG_ROPE:
        return None
    module, _, kind = tensor.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    found = _LAYER.fullmatch(tensor)
    parts = {**_PARTS, **family_of(file).parts}
    if found is None or found[2] not in parts:
        raise ConfigError(f"{file.path}: unknown tensor {tensor}")
    return f"model.layers.{found[1]}.{parts[found[2]]}.{found[3]}"
