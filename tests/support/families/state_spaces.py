"""Cases of families whose layers have a state space of Mamba2 besides attention."""

from typing import Any

from transformers import BambaConfig, GraniteMoeHybridConfig, NemotronHConfig

from support.families.case import FamilyCase, sizes
from support.families.experts import ATTENTION_LINEARS, GRANITE_FACTORS

SSM_LINEARS = ("in_proj", "out_proj")
GRANITE: dict[str, Any] = {
    "linears": (*SSM_LINEARS, *ATTENTION_LINEARS, "input_linear", "output_linear")
}
GRANITE_MOE: dict[str, Any] = GRANITE | {
    "parameters": tuple(
        f"block_sparse_moe.{weight}"
        for weight in ("router.weight", "experts.gate_up_proj", "experts.down_proj")
    )
}
BAMBA: dict[str, Any] = {
    "linears": (*SSM_LINEARS, *ATTENTION_LINEARS, "gate_proj", "up_proj", "down_proj")
}
NEMOTRON: dict[str, Any] = {
    # PEFT refuses out_proj in models of this type alone.
    "linears": ("in_proj", *ATTENTION_LINEARS, "up_proj", "down_proj"),
}
NEMOTRON_MOE: dict[str, Any] = NEMOTRON | {
    "parameters": tuple(
        f"mixer.{weight}" for weight in ("gate.weight", "experts.up_proj", "experts.down_proj")
    )
}
MIXED = ["mamba", "mamba", "attention", "mamba"]


def granite(**changes: Any) -> GraniteMoeHybridConfig:
    """Configuration without experts: four heads in two groups, and odd sizes."""
    fields = sizes(
        max_position_embeddings=256,
        num_local_experts=0,
        shared_intermediate_size=40,
        layer_types=MIXED,
        mamba_n_heads=4,
        mamba_n_groups=2,
        mamba_d_state=10,
        mamba_chunk_size=32,
        time_step_limit=[0.0, float("inf")],
    )
    return GraniteMoeHybridConfig(**(fields | GRANITE_FACTORS | changes))


def granite_moe(**changes: Any) -> GraniteMoeHybridConfig:
    fields = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24}
    return granite(**(fields | changes))


def bamba(**changes: Any) -> BambaConfig:
    fields = sizes(
        max_position_embeddings=256,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_state=12,
        mamba_chunk_size=16,
    )
    return BambaConfig(**(fields | changes))


def nemotron(**changes: Any) -> NemotronHConfig:
    """Configuration without experts; the sizes of heads and of the model have no common rule."""
    fields = sizes(
        max_position_embeddings=256,
        head_dim=12,
        layers_block_type=["mamba", "mlp", "attention", "mamba", "mlp"],
        mamba_num_heads=4,
        mamba_head_dim=6,
        ssm_state_size=10,
        n_groups=2,
        chunk_size=32,
    )
    fields.pop("num_hidden_layers")
    return NemotronHConfig(**(fields | changes))


def nemotron_moe(**changes: Any) -> NemotronHConfig:
    fields = {
        "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 40,
        "routed_scaling_factor": 1.5,
        "n_group": 2,
        "topk_group": 1,
    }
    return nemotron(**(fields | changes))


CASES: dict[str, FamilyCase] = {
    "granite-hybrid": FamilyCase(config=granite, is_quick=True, **GRANITE),
    "granite-hybrid-rope": FamilyCase(
        config=lambda: granite(
            position_embedding_type="rope",
            attention_bias=True,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            mamba_n_groups=1,
            mamba_d_conv=2,
            tie_word_embeddings=True,
            time_step_limit=[0.5, 1.5],
        ),
        **GRANITE,
    ),
    "granite-hybrid-moe": FamilyCase(config=granite_moe, is_quick=True, **GRANITE_MOE),
    "bamba": FamilyCase(config=bamba, is_quick=True, **BAMBA),
    "bamba-biases": FamilyCase(
        config=lambda: bamba(
            attn_layer_indices=[0, 3],
            attention_bias=True,
            mlp_bias=True,
            mamba_proj_bias=True,
            mamba_n_groups=4,
        ),
        **BAMBA,
    ),
    "nemotron-h": FamilyCase(config=nemotron, is_quick=True, **NEMOTRON),
    "nemotron-h-biases": FamilyCase(
        config=lambda: nemotron(
            use_bias=True,
            use_conv_bias=False,
            n_groups=4,
            layers_block_type=["attention", "mlp", "mamba", "mamba"],
        ),
        **NEMOTRON,
    ),
    "nemotron-h-moe": FamilyCase(config=nemotron_moe, is_quick=True, **NEMOTRON_MOE),
    "nemotron-h-latent": FamilyCase(
        config=lambda: nemotron_moe(
            moe_latent_size=20,
            norm_topk_prob=False,
            n_group=1,
            mlp_hidden_act="silu",
            layers_block_type=["mlp", "moe", "mamba", "attention"],
        ),
        linears=(*NEMOTRON["linears"], "fc1_latent_proj", "fc2_latent_proj"),
        parameters=NEMOTRON_MOE["parameters"],
    ),
}
