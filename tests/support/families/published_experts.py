"""Published models with experts: their config.json, and the tensors of their second layer."""

from support.families.published import HEAD_NORMS, NORMS, Published, config

ATTENTION = "self_attn.{q,k,v,o}_proj"


def experts(number: int, parts: str = "mlp.experts.{}.{{gate,up,down}}_proj") -> str:
    """Return the names of so many experts' weights; parts: of one, with {} for its number."""
    return parts.format("{" + ",".join(map(str, range(number))) + "}")


MODELS: dict[str, Published] = {
    "mixtral-8x7b": Published(
        config=config(
            "MixtralForCausalLM",
            "4096 14336 32 32 8 32000",
            hidden_act="silu",
            max_position_embeddings=32768,
            num_experts_per_tok=2,
            num_local_experts=8,
            rms_norm_eps=1e-05,
            rope_theta=1000000.0,
            router_aux_loss_coef=0.02,
            sliding_window=None,
            tie_word_embeddings=False,
        ),
        num_parameters=46_702_792_704,
        num_tensors=32 * 31 + 3,
        parts=(
            f"{ATTENTION} {NORMS} block_sparse_moe.gate "
            + experts(8, "block_sparse_moe.experts.{}.w{{1,2,3}}")
        ),
        windows={0: None, 31: None},
        thetas={0: 1e6},
        score_scale=128**-0.5,
    ),
    "qwen1.5-moe-a2.7b": Published(
        config=config(
            "Qwen2MoeForCausalLM",
            "2048 5632 24 16 16 151936",
            decoder_sparse_step=1,
            hidden_act="silu",
            max_position_embeddings=8192,
            max_window_layers=21,
            moe_intermediate_size=1408,
            norm_topk_prob=False,
            num_experts=60,
            num_experts_per_tok=4,
            rms_norm_eps=1e-06,
            rope_theta=1000000.0,
            shared_expert_intermediate_size=5632,
            sliding_window=32768,
            tie_word_embeddings=False,
            use_sliding_window=False,
        ),
        num_parameters=14_315_784_192,
        num_tensors=24 * (4 + 3 + 2 + 1 + 60 * 3 + 4) + 3,
        parts=(
            f"{ATTENTION} {NORMS} mlp.gate mlp.shared_expert_gate "
            f"mlp.shared_expert.{{gate,up,down}}_proj {experts(60)}"
        ),
        biases="self_attn.{q,k,v}_proj",
        windows={0: None, 23: None},
        thetas={0: 1e6},
        score_scale=128**-0.5,
    ),
    "qwen3-30b-a3b": Published(
        config=config(
            "Qwen3MoeForCausalLM",
            "2048 6144 48 32 4 151936",
            attention_bias=False,
            decoder_sparse_step=1,
            head_dim=128,
            hidden_act="silu",
            max_position_embeddings=40960,
            max_window_layers=48,
            mlp_only_layers=[],
            moe_intermediate_size=768,
            norm_topk_prob=True,
            num_experts=128,
            num_experts_per_tok=8,
            rms_norm_eps=1e-06,
            rope_scaling=None,
            rope_theta=1000000.0,
            sliding_window=None,
            tie_word_embeddings=False,
            use_sliding_window=False,
        ),
        num_parameters=30_532_122_624,
        num_tensors=18_867,
        parts=f"{ATTENTION} {NORMS} {HEAD_NORMS} mlp.gate {experts(128)}",
        windows={0: None, 47: None},
        thetas={0: 1e6},
        score_scale=128**-0.5,
    ),
    "olmoe-1b-7b": Published(
        config=config(
            "OlmoeForCausalLM",
            "2048 1024 16 16 16 50304",
            attention_bias=False,
            clip_qkv=None,
            hidden_act="silu",
            max_position_embeddings=4096,
            norm_topk_prob=False,
            num_experts=64,
            num_experts_per_tok=8,
            rms_norm_eps=1e-05,
            rope_scaling=None,
            rope_theta=10000.0,
            tie_word_embeddings=False,
        ),
        num_parameters=6_919_161_856,
        num_tensors=16 * (4 + 4 + 1 + 64 * 3) + 3,
        parts=f"{ATTENTION} {NORMS} {HEAD_NORMS} mlp.gate {experts(64)}",
        thetas={0: 1e4},
        score_scale=128**-0.5,
    ),
}
