"""Names in GGUF files: architectures, and tensors as Hugging Face's checkpoints name them.

The names are those of llama.cpp's gguf-py (gguf/constants.py).
"""

import itertools
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

_OF_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.")
_LAYER: Final = re.compile(r"blk\.(\d{1,6})\.((?:shortconv\.)?\w+)(?:\.(\w+))?")
_OUTSIDE: Final = {
    "token_embd": "model.embed_tokens",
    "output": "lm_head",
    "output_norm": "model.norm",
    "token_embd_norm": "model.embedding_norm",
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
"""Parts of a layer by their names in files. One with a kind, or that has none, is a whole name."""
_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


_DELTA: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_out": "linear_attn.out_proj",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_a": "linear_attn.A_log",
}
_LFM2: Final = {
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
_LFM2_EXPERTS: Final = {
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    "ffn_gate_exps": "feed_forward.experts.w1",
    "ffn_up_exps": "feed_forward.experts.w3",
    "ffn_down_exps": "feed_forward.experts.down_proj",
}
_QWEN_EXPERTS: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_DELTA_PARTS: Final = tuple(f"linear_attn.in_proj_{part}" for part in ("qkv", "z"))
_GROUPED_DELTA: Final = {
    **_DELTA,
    # Older files have the outputs of all parts in one tensor, in the order of checkpoints.
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
_STATE_SPACE: Final = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt.bias": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
_SHARED_HALVES: Final = tuple(f"mlp.shared_expert.{part}_proj" for part in ("gate", "up"))
_GRANITE_PARTS: Final = {
    **_STATE_SPACE,
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **{
        f"ffn_{part}_exps": f"block_sparse_moe.experts.{part}_proj"
        for part in ("gate", "up", "down")
    },
    # A model without experts has the shared one alone.
    **{f"ffn_{part}": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up")},
    **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up")},
    "ffn_down": "shared_mlp.output_linear",
    "ffn_down_shexp": "shared_mlp.output_linear",
}
_NEMOTRON_PARTS: Final = {
    **{own: name.replace("mamba.", "mixer.") for own, name in _STATE_SPACE.items()},
    "attn_norm": "norm",
    **{f"attn_{part}": f"mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    **{f"ffn_{part}_exps": f"mixer.experts.{part}_proj" for part in ("up", "down")},
    **{f"ffn_{part}_shexp": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
}
_ROTATED: Final = tuple(f".{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias"))
_DELTA_RULE: Final = ".linear_attn."
_OF_ONE_NUMBER: Final = ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")
"""Tensors of a delta rule that have one row for each value head."""
_BEHIND_KEYS: Final = ("in_proj_qkv.weight", "conv1d.weight")
"""Those whose last rows are the values'."""


class HeadLayout(NamedTuple):
    """Heads of a layer, by which files order rows and columns."""

    head_dim: int = 1
    """Outputs of q_proj and k_proj for one head."""
    num_keys: int = 0
    """Key heads of a delta rule; 0: the layer has none."""
    num_values: int = 0
    value_size: int = 0
    by_head: Mapping[str, tuple[int, tuple[int, ...]]] = {}
    """Number of heads, and the outputs of each part of one, of a linear layer that has those of a
    head together in checkpoints, by its name."""

    @classmethod
    def of(cls, outputs: Mapping[str, int], head_dim: int, num_keys: int) -> "HeadLayout":
        """outputs: of a layer's linear layers by name. num_keys: of its delta rule, if any."""
        num_values = outputs.get("in_proj_b", 0)
        if not num_values:
            return cls(head_dim)
        return cls(head_dim, num_keys, num_values, outputs["in_proj_z"] // num_values)

    def tiled(self, size: int, first: int = 0) -> list[int] | None:
        """Return the place in files of each number; None: the order is that of Hugging Face.

        Value heads have `size` numbers each, and `first` numbers lie in front of them. Hugging Face
        has the values of a key side by side. Files have a first value of each key, then a second.
        """
        per_key = self.num_values // self.num_keys if self.num_keys else 1
        if per_key == 1:
            return None
        heads = (
            own * self.num_keys + key for key in range(self.num_keys) for own in range(per_key)
        )
        starts = (first + head * size for head in heads)
        return [*range(first), *(start + number for start in starts for number in range(size))]

    def in_parts(self, name: str) -> list[int] | None:
        """Return the place of each output where the first parts of all heads lie in front.

        None: the outputs of this weight are in that order in checkpoints.
        """
        module = name.removesuffix(".weight").rpartition(".")[2]
        num_heads, sizes = self.by_head.get(module, (0, ()))
        if not num_heads:
            return None
        firsts = itertools.accumulate((size * num_heads for size in sizes), initial=0)
        parts = list(zip(firsts, sizes, strict=False))
        return [
            first + head * size + number
            for head in range(num_heads)
            for first, size in parts
            for number in range(size)
        ]


class GgufFamily(NamedTuple):
    """Differences of an architecture from a plain decoder."""

    name: str
    """Value of general.architecture."""
    architectures: tuple[str, ...]
    """Names in Hugging Face's config.json; a file without one is of the first."""
    parts: Mapping[str, str] = {}
    """Names of parts of a layer, in addition to the usual ones."""
    outside: Mapping[str, str] = {}
    """Names of modules outside the layers, in addition to the usual ones."""
    has_permuted_heads: bool = False
    """Whether rows of queries and keys are in the order of rotations of neighbours."""
    joined: Mapping[str, tuple[str, ...]] = {}
    """Layers of checkpoints of which files have the parts apart, one after another."""
    norm_offset: float = 0.0
    """Number that is added to the weights of norms, but those of the outputs of delta rules."""

    def file_rows(self, name: str, num_rows: int, heads: HeadLayout) -> list[int] | None:
        """Return the file's row for each row of a tensor; None: they are in order.

        Within a permuted head the two rows of a pair that rotates are neighbours, while Hugging
        Face has all first rows of pairs, then all second ones. name: in Hugging Face's
        checkpoints. Raises ConfigError if the rows are no whole heads.
        """
        if _DELTA_RULE in name:
            part = name.rpartition(_DELTA_RULE)[2]
            if part in _OF_ONE_NUMBER:
                return heads.tiled(1)
            if part in _BEHIND_KEYS or part == "in_proj_z.weight":
                of_values = heads.num_values * heads.value_size
                return heads.tiled(heads.value_size, max(0, num_rows - of_values))
            return None
        if not self.has_permuted_heads or not name.endswith(_ROTATED):
            return None
        head_dim = heads.head_dim
        if num_rows % head_dim:
            raise ConfigError(f"{name} has {num_rows} rows, no multiple of {head_dim}")
        of_head = (*range(0, head_dim, 2), *range(1, head_dim, 2))
        return [start + row for start in range(0, num_rows, head_dim) for row in of_head]

    def norm_shift(self, name: str) -> float:
        """Return the number that is added to the weights of a tensor; 0 for one of no norm."""
        is_shifted = name.endswith("norm.weight") and _DELTA_RULE not in name
        return self.norm_offset if is_shifted else 0.0

    def file_columns(self, name: str, heads: HeadLayout) -> list[int] | None:
        """Return the file's column for each column of a weight; None: they are in order."""
        is_of_values = name.endswith(f"{_DELTA_RULE}out_proj.weight")
        return heads.tiled(heads.value_size) if is_of_values else None


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
        GgufFamily("lfm2", ("Lfm2ForCausalLM",), _LFM2),
        GgufFamily("lfm2moe", ("Lfm2MoeForCausalLM",), {**_LFM2, **_LFM2_EXPERTS}),
        GgufFamily(
            "qwen35",
            ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
            _DELTA,
            norm_offset=-1.0,
        ),
        GgufFamily(
            "qwen35moe",
            ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
            {**_DELTA, **_QWEN_EXPERTS},
            norm_offset=-1.0,
        ),
        GgufFamily(
            "qwen3next",
            ("Qwen3NextForCausalLM",),
            {**_GROUPED_DELTA, **_QWEN_EXPERTS},
            joined={"linear_attn.in_proj_qkvz": _DELTA_PARTS},
            norm_offset=-1.0,
        ),
        GgufFamily(
            "granitehybrid",
            ("GraniteMoeHybridForCausalLM",),
            _GRANITE_PARTS,
            has_permuted_heads=True,
            joined={"shared_mlp.input_linear": _SHARED_HALVES},
        ),
        *(
            GgufFamily(
                name,
                ("NemotronHForCausalLM",),
                _NEMOTRON_PARTS,
                {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
                has_permuted_heads=True,
            )
            for name in ("nemotron_h", "nemotron_h_moe")
        ),
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


def num_layers(file: GgufFile) -> int | None:
    """Return how many layers there are, without those that draft tokens; None: it is unknown."""
    keys = ("block_count", "nextn_predict_layers")
    name = file.metadata.get("general.architecture")
    count, drafting = (file.metadata.get(f"{name}.{key}") for key in keys)
    if type(count) is not int:
        return None
    return count - drafting if type(drafting) is int and 0 < drafting < count else count


def hugging_face_name(file: GgufFile, tensor: str) -> str | None:
    """Return the name of a tensor in Hugging Face's checkpoints; None: it is not needed.

    config.json has what some tensors are for, and layers that draft tokens are left out. Raises
    ConfigError for a tensor that no supported model has.
    """
    if tensor == ROPE_FACTORS or tensor in LONG_ROPE:
        return None
    module, _, kind = tensor.rpartition(".")
    outside = {**_OUTSIDE, **family_of(file).outside}
    if module in outside:
        return f"{outside[module]}.{kind}"
    of_layer = _OF_LAYER.match(tensor)
    count = num_layers(file)
    if of_layer is not None and count is not None and int(of_layer[1]) >= count:
        return None
    found = _LAYER.fullmatch(tensor)
    parts = {**_PARTS, **family_of(file).parts}
    part, kind = (found[2], found[3]) if found is not None else ("", "")
    own = parts.get(f"{part}.{kind}" if kind else part)
    if found is None or (own is None and (not kind or part not in parts)):
        raise ConfigError(f"{file.path}: unknown tensor {tensor}")
    return f"model.layers.{found[1]}.{own or f'{parts[part]}.{kind}'}"
