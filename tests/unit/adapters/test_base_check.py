"""An adapter against a base: shapes, names, and the types of the pool."""

import dataclasses

import msgspec
import numpy as np
import pytest

from loraplex.adapters.base_check import (
    BaseCheck,
    Remarks,
    WarningCode,
    check_base_name,
    check_cast,
    check_magnitudes,
    check_shapes,
    check_targets,
    divided,
    other_base,
)
from loraplex.adapters.canonical import CanonicalRow, RowKind
from loraplex.adapters.shapes import BaseShapes
from loraplex.adapters.targets import targets_of
from loraplex.adapters.tensor_file import RawTensor
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    UnsupportedFeatureError,
)
from loraplex.core.rank_limits import RankLimits
from support.naming import naming

LAYERS_ONLY = BaseShapes(2, {"q_proj": (8, 12), "v_proj": (8, 4)})
SHAPES = BaseShapes(
    2, LAYERS_ONLY.modules, vocab_size=50, hidden_size=8, biased_modules=("q_proj",)
)


def raw(*shape: int, value: float = 1.0, kind: str = "f4") -> RawTensor:
    dtype = {"f4": "F32", "f2": "F16", "f8": "F64", "i8": "I64"}[kind]
    return RawTensor(dtype, shape, np.full(shape, value, kind).tobytes())


def row(kind: RowKind, module: str = "q_proj", layer: int | None = 0, **tensors) -> CanonicalRow:
    path = module if layer is None else f"model.layers.{layer}.self_attn.{module}"
    return CanonicalRow(layer, module, None, kind, 1.0, tensors, path)


def lora(rank=2, num_in=8, num_out=12, **place) -> CanonicalRow:
    return row(RowKind.LORA, a=raw(rank, num_in), b=raw(num_out, rank), **place)


def end(kind: RowKind, module: str = "lm_head", **tensors) -> CanonicalRow:
    return row(kind, module, None, **tensors)


TOKENS = end(RowKind.TOKENS, "embed_tokens", indices=raw(2, value=7, kind="i8"), weight=raw(2, 8))
GOOD = [
    lora(),
    lora(num_out=4, module="v_proj", layer=1),
    row(RowKind.BIAS, bias=raw(12)),
    row(RowKind.MAGNITUDE, magnitude=raw(12)),
    end(RowKind.LORA, a=raw(2, 8), b=raw(50, 2)),
    end(RowKind.LORA, "embed_tokens", a=raw(2, 50), b=raw(8, 2)),
    end(RowKind.FULL, weight=raw(50, 8)),
    end(RowKind.FULL, "embed_tokens", base=raw(50, 8)),
    end(RowKind.MAGNITUDE, magnitude=raw(50)),
    TOKENS,
]


ENDS = [good for good in GOOD if good.layer is None]


@pytest.mark.parametrize("part", ENDS, ids=lambda row: f"{row.kind}-{row.module}")
def test_a_base_whose_ends_cannot_be_adapted(part: CanonicalRow) -> None:
    shapes = msgspec.structs.replace(SHAPES, adapts_ends=False)
    with pytest.raises(UnsupportedFeatureError, match=naming("output layer")):
        check_shapes([part], shapes, max_ranks=RankLimits(4))
    with pytest.raises(AdapterMismatchError, match=naming("layer -1", 2)):
        check_targets(
            targets_of(part, SHAPES, max_ranks=RankLimits(4)), shapes, max_ranks=RankLimits(4)
        )


@pytest.mark.parametrize("ties_embeddings", [False, True])
@pytest.mark.parametrize("part", ENDS, ids=lambda row: f"{row.kind}-{row.module}")
def test_a_bias_of_the_output_layer_allows_only_its_lora(
    part: CanonicalRow, ties_embeddings: bool
) -> None:
    shapes = msgspec.structs.replace(
        SHAPES, biased_modules=("lm_head",), ties_embeddings=ties_embeddings
    )
    targets = list(targets_of(part, shapes, max_ranks=RankLimits(4)))
    is_of_head = ties_embeddings or part.module == "lm_head"
    if part.kind is RowKind.LORA or not is_of_head:
        check_shapes([part], shapes, max_ranks=RankLimits(4))
        check_targets(targets, shapes, max_ranks=RankLimits(4))
        return
    with pytest.raises(UnsupportedFeatureError, match=naming("lm_head", "LoRA")):
        check_shapes([part], shapes, max_ranks=RankLimits(4))
    with pytest.raises(AdapterMismatchError, match=naming("layer -1", 2)):
        check_targets(targets, shapes, max_ranks=RankLimits(4))


@pytest.mark.parametrize("good", GOOD, ids=lambda row: f"{row.kind}-{row.module}")
def test_a_match(good):
    check_shapes([good], SHAPES, max_ranks=RankLimits(4))
    check_targets(targets_of(good, SHAPES, RankLimits(4)), SHAPES, RankLimits(4))


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (lora(num_in=9), ("model.layers.0.self_attn.q_proj.lora_A", "[2, 9]", "[2, 8]")),
        (lora(num_out=4), ("model.layers.0.self_attn.q_proj.lora_B", "[4, 2]", "[12, 2]")),
        (lora(module="o_proj"), ("o_proj", "q_proj", "v_proj")),
        (lora(layer=2), (2,)),
        (row(RowKind.BIAS, "v_proj", bias=raw(4)), ("model.layers.0.self_attn.v_proj.bias",)),
        (row(RowKind.BIAS, bias=raw(13)), ("model.layers.0.self_attn.q_proj.bias", "[13]", "[12]")),
        (
            row(RowKind.MAGNITUDE, magnitude=raw(11)),
            ("model.layers.0.self_attn.q_proj.lora_magnitude_vector", "[11]", "[12]"),
        ),
        (end(RowKind.LORA, a=raw(2, 8), b=raw(51, 2)), ("lm_head.lora_B", "[51, 2]", "[50, 2]")),
        (
            end(RowKind.LORA, a=raw(2, 8), b=raw(51, 2)),
            (51, 50, "lm_head.lora_B"),
        ),
        (
            end(RowKind.LORA, "embed_tokens", a=raw(2, 47), b=raw(8, 2)),
            (47, 50, "embed_tokens.lora_A"),
        ),
        (end(RowKind.FULL, weight=raw(51, 8)), (51, "lm_head.weight", "[50, 8]")),
        (
            end(RowKind.FULL, "embed_tokens", base=raw(40, 8)),
            (40, "embed_tokens.base_layer.weight", "[50, 8]"),
        ),
        (end(RowKind.FULL, weight=raw(50, 9)), ("lm_head.weight", "[50, 9]", "[50, 8]")),
        (
            dataclasses.replace(
                TOKENS, tensors={"indices": raw(1, value=50, kind="i8"), "weight": raw(1, 8)}
            ),
            (50, "embed_tokens"),
        ),
    ],
)
def test_another_base_is_a_mismatch(bad, named):
    with pytest.raises(AdapterMismatchError, match=naming(*named)):
        check_shapes([bad], SHAPES, max_ranks=RankLimits(4))


@pytest.mark.parametrize(
    ("of", "shapes"),
    [
        (lora(), BaseShapes(2, {"q_proj": (8, 13)})),
        (lora(layer=1), BaseShapes(1, SHAPES.modules)),
        (end(RowKind.FULL, weight=raw(50, 8)), LAYERS_ONLY),
        (end(RowKind.LORA, a=raw(2, 8), b=raw(50, 2)), BaseShapes(2, SHAPES.modules, 49, 8)),
        (row(RowKind.BIAS, bias=raw(12)), BaseShapes(2, {"q_proj": (8, 24)}, 50, 8)),
        (TOKENS, BaseShapes(2, SHAPES.modules, 50, 16)),
    ],
)
def test_pieces_that_were_staged_for_another_base(of, shapes):
    with pytest.raises(AdapterMismatchError, match="the base model"):
        check_targets(targets_of(of, SHAPES, RankLimits(4)), shapes, RankLimits(4))


@pytest.mark.parametrize(
    "check",
    [
        lambda *base: check_shapes([lora()], *base),
        lambda *base: check_targets(targets_of(lora(), SHAPES, RankLimits(4)), *base),
    ],
)
def test_the_rank_is_limited(check):
    with pytest.raises(AdapterTooLargeError, match=r"rank 2.* 1 "):
        check(SHAPES, RankLimits(1))


@pytest.mark.parametrize("other", GOOD[2:], ids=lambda row: f"{row.kind}-{row.module}")
def test_where_only_lora_of_layers_is_served_the_rest_is_refused(other):
    with pytest.raises(UnsupportedFeatureError, match=naming("LoRA", "q_proj", "v_proj")):
        check_shapes([other], LAYERS_ONLY, max_ranks=RankLimits(4))


@pytest.mark.parametrize(
    "rows",
    [
        [row(RowKind.FULL, weight=raw(12, 8))],
        [row(RowKind.FULL, "input_layernorm", weight=raw(8))],
        [row(RowKind.FULL, "norm", None, weight=raw(8))],
        [TOKENS, end(RowKind.LORA, "embed_tokens", a=raw(2, 50), b=raw(8, 2))],
        [TOKENS, end(RowKind.FULL, "embed_tokens", weight=raw(50, 8))],
    ],
)
def test_what_is_not_served_is_refused_by_its_tensor(rows):
    with pytest.raises(UnsupportedFeatureError, match=rows[0].origin):
        check_shapes(rows, SHAPES, max_ranks=RankLimits(4))


def test_two_copies_of_one_tied_parameter_are_the_same():
    tied = BaseShapes(2, LAYERS_ONLY.modules, 50, 8, ties_embeddings=True)
    copies = [
        end(RowKind.FULL, module, base=raw(50, 8, value=value))
        for module, value in (("embed_tokens", 1.0), ("lm_head", 2.0))
    ]
    check_shapes(copies, SHAPES, max_ranks=RankLimits(4))
    with pytest.raises(AdapterMismatchError, match=naming("embed_tokens", "lm_head")):
        check_shapes(copies, tied, max_ranks=RankLimits(4))
    check_shapes([copies[0], end(RowKind.FULL, base=raw(50, 8))], tied, max_ranks=RankLimits(4))


def test_names_of_bases():
    assert check_base_name("org/Model-8B", "model-8b", BaseCheck.ERROR) == []
    assert check_base_name(None, "a", BaseCheck.ERROR) == []
    for quantized in (
        *("o/Model-8B-unsloth-bnb-4bit", "Model-8B-GPTQ-Int4", "x/model-8b-awq/"),
        *("model-8b.Q4_K_M", "model-8b-Q8_0", "Model-8B-f16"),
    ):
        (warning,) = check_base_name(quantized, "model-8b", BaseCheck.ERROR)
        assert warning == (
            f"trained on {quantized!r}; this server runs 'model-8b': the same model with "
            "other rounding of its weights"
        )
        assert check_base_name(quantized, quantized, BaseCheck.ERROR, "gguf") == []
    (warning,) = check_base_name("o/model-8b", "model-8b-GPTQ", BaseCheck.ERROR, "gptq")
    assert "this server runs 'model-8b-GPTQ' (stored as gptq): the same" in warning
    (warning,) = check_base_name("o/other", "model-8b-GPTQ", BaseCheck.WARN, "gptq")
    assert warning.endswith("runs 'model-8b-GPTQ' (stored as gptq)")
    assert check_base_name("o/Model-8B-Instruct-AWQ", "model-8b", BaseCheck.WARN)
    assert check_base_name("a", "", BaseCheck.ERROR) == []
    (warning,) = check_base_name("org/other", "model", BaseCheck.WARN)
    assert "'org/other'" in warning
    with pytest.raises(AdapterMismatchError, match="adapter_base_check"):
        check_base_name("org/other", "model", BaseCheck.ERROR)


LLAMA = "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("trained_on", "base_model", "architecture", "kind"),
    [
        ("mistralai/Mistral-7B-v0.1", "/models/prod", LLAMA, "architecture than Llama"),
        ("mistralai/Mistral-7B-v0.1", "/models/Llama-3-8B", LLAMA, "size"),
        ("Qwen/Qwen2.5-7B", "/models/mine", LLAMA, "architecture"),
        ("meta-llama/Llama-3.2-1B", "Llama-3.2-3B-Instruct", LLAMA, "size"),
        ("mistralai/Mixtral-8x7B", "mixtral-8x22b", "MixtralForCausalLM", "size"),
        ("google/gemma-3-270m", "gemma-3-1b-it", "Gemma3ForCausalLM", "size"),
    ],
)
def test_another_architecture_or_size_is_an_error(trained_on, base_model, architecture, kind):
    with pytest.raises(AdapterMismatchError, match=f"of another {kind}.*adapter_base_check = warn"):
        check_base_name(trained_on, base_model, BaseCheck.AUTO, architecture=architecture)
    (warning,) = check_base_name(trained_on, base_model, BaseCheck.WARN, architecture=architecture)
    assert kind in warning


@pytest.mark.parametrize(
    ("trained_on", "base_model", "architecture"),
    [
        ("meta-llama/Llama-3-8B", "NousResearch/Hermes-3-Llama-3.1-8B", LLAMA),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "Qwen2.5-7B-Instruct", "Qwen2ForCausalLM"),
        ("HuggingFaceTB/SmolLM2-360M", "smollm2-0.36b", LLAMA),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b-instruct-2507", "Qwen3MoeForCausalLM"),
        ("unsloth/phi-4", "phi-4-mine", LLAMA),
        ("teknium/OpenHermes-2.5", "/models/prod", "MistralForCausalLM"),
        ("me/zephyr-7b-beta", "/models/prod", "MistralForCausalLM"),
        ("org/base", "me/prod", ""),
        ("/hub/models--o--Llama-3-8B/snapshots/7b", "/models/llama-3-8b-chat", LLAMA),
    ],
)
def test_another_fine_tune_is_a_warning(trained_on, base_model, architecture):
    (warning,) = check_base_name(trained_on, base_model, BaseCheck.AUTO, architecture=architecture)
    assert repr(trained_on) in warning
    with pytest.raises(AdapterMismatchError):
        check_base_name(trained_on, base_model, BaseCheck.ERROR, architecture=architecture)


def test_a_snapshot_in_the_hub_s_cache_has_the_name_of_its_repository():
    snapshot = "/home/me/.cache/huggingface/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de"
    assert check_base_name(snapshot, "Qwen/Qwen3-0.6B", BaseCheck.ERROR) == []
    assert other_base(snapshot, "qwen3-0.6b-bnb-4bit") is None


@pytest.mark.parametrize("trained_on", [None, "o/Model-8B", "o/other"])
def test_adapters_of_the_original_of_an_awq_base(trained_on):
    *_, warning = check_base_name(trained_on, "model-8b-AWQ", BaseCheck.WARN, "awq")
    assert "the base model is AWQ" in warning
    assert check_base_name("me/Model-8B-AWQ", "model-8b-AWQ", BaseCheck.WARN, "awq") == []
    for warning in check_base_name(trained_on, "model-8b-GPTQ", BaseCheck.WARN, "gptq"):
        assert "AWQ" not in warning


def test_rounding_is_the_only_note_and_each_warning_has_a_code():
    [rounding] = check_cast([lora()], "bfloat16")
    [other] = check_base_name("meta/Llama-2", "other/mistral", BaseCheck.WARN)
    [quantised] = check_base_name("meta/Llama-2-GPTQ", "meta/Llama-2", BaseCheck.WARN, "gptq")
    assert divided([rounding, other, "an end token", quantised]) == Remarks(
        warnings=(other, "an end token", quantised),
        codes=(WarningCode.OTHER_BASE, WarningCode.OTHER, WarningCode.OTHER_ROUNDING),
        notes=(rounding,),
    )


def test_rounded_tensors_are_reported_and_too_large_ones_refused():
    assert check_cast([lora()], "float32") == []
    (warning,) = check_cast([lora()], "bfloat16")
    assert warning.startswith("tensors in F32 are rounded to the bfloat16")
    fits = row(RowKind.BIAS, bias=raw(12, value=-65519.0))
    check_cast([fits], "float16")
    large = row(RowKind.BIAS, bias=raw(12, value=-65520.0))
    with pytest.raises(
        InvalidAdapterError,
        match=naming("bias", "model.layers.0.self_attn.q_proj", "float16", "F32"),
    ):
        check_cast([large], "float16")
    with pytest.raises(InvalidAdapterError, match="float32"):
        check_cast([row(RowKind.BIAS, bias=raw(12, value=1e39, kind="f8"))], "float32")


@pytest.mark.parametrize(
    ("scale", "a", "b", "pool_dtype", "is_taken"),
    [
        (2.0, 1.0, 1.0, "float16", True),
        (2.0, 200.0, 200.0, "float16", False),
        (2.0, 200.0, 200.0, "bfloat16", True),
        (1e38 / 8, 0.01, 0.01, "float32", False),
        (1e38 / 8, 0.01, 0.0, "float32", False),
        (1e18, 1.0, 1.0, "bfloat16", True),
        (1e20, 1.0, 1.0, "bfloat16", False),
        (1.0, 1.0, 1e30, "float32", False),
        (-1e30, 1.0, 1.0, "float32", False),
    ],
)
def test_lora_makes_numbers_that_later_steps_compute_with(
    scale: float, a: float, b: float, pool_dtype: str, is_taken: bool
) -> None:
    tensors = {"a": raw(2, 8, value=a), "b": raw(12, 2, value=b)}
    own = dataclasses.replace(lora(), scale=scale, tensors=tensors)
    if is_taken:
        check_magnitudes([own], pool_dtype)
        return
    with pytest.raises(
        InvalidAdapterError, match=rf"{own.origin} \(scale {scale:g}".replace("+", r"\+")
    ):
        check_magnitudes([own], pool_dtype)


@pytest.mark.parametrize("name", ["bias", "magnitude", "factor", "weight", "base"])
def test_other_values_are_bounded_as_well(name: str) -> None:
    kinds = {"bias": RowKind.BIAS, "weight": RowKind.FULL, "base": RowKind.FULL}
    kind = kinds.get(name, RowKind.MAGNITUDE)
    check_magnitudes([row(kind, **{name: raw(12, value=1e4)})], "float16")
    with pytest.raises(InvalidAdapterError, match="1e\\+20"):
        check_magnitudes([row(kind, **{name: raw(12, value=1e20)})], "bfloat16")
