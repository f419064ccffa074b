"""TensorRT-LLM's table of LoRA modules, ids 0 to 17: a base has each, and each changes outputs.

Ids 8 to 12 need a model with cross attention, 13 to 17 one with experts.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import pytest
import torch

from loraplex import LLM, SamplingParams
from loraplex.adapters.formats.modules import LORA_MODULES
from loraplex.core.errors import AdapterMismatchError
from loraplex.models.registry import read_config
from loraplex.models.spec import ModelSpec
from support.encoder_decoders import CASES, save_case, write_tokenizer
from support.families.case import FamilyCase
from support.families.experts import qwen2_moe
from support.module_rows import one_module

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE: Final[Mapping[int, str]] = {
    0: "attn_qkv",
    1: "attn_q",
    2: "attn_k",
    3: "attn_v",
    4: "attn_dense",
    5: "mlp_h_to_4h",
    6: "mlp_4h_to_h",
    7: "mlp_gate",
    8: "cross_attn_qkv",
    9: "cross_attn_q",
    10: "cross_attn_k",
    11: "cross_attn_v",
    12: "cross_attn_dense",
    13: "moe_h_to_4h",
    14: "moe_4h_to_h",
    15: "moe_gate",
    16: "moe_router",
    17: "mlp_router",
}
"""Names by id, as TensorRT-LLM's documentation of LoRA lists them."""
CROSS: Final = range(8, 13)
DENSE_MLP: Final = range(5, 8)
PROMPT: Final = [5, 17, 60, 3, 44, 9]
SAMPLING: Final = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, return_logits=True)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a Qwen2-MoE whose first layer is dense, with a shared expert in the others."""
    folder = tmp_path_factory.mktemp("mixture")
    FamilyCase(config=lambda: qwen2_moe(num_hidden_layers=2, vocab_size=240)).save(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def translator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("translator")
    save_case(folder, CASES["flan-t5"])
    return folder


@pytest.fixture(scope="module")
def models(mixture: Path, translator: Path) -> Iterator[Mapping[Path, LLM]]:
    found: dict[Path, LLM] = {}
    try:
        for folder in (mixture, translator):
            found[folder] = LLM(
                folder,
                state_dir=folder / "state",
                dtype="float32",
                kv_cache_bytes=1 << 22,
                max_num_seqs=2,
                max_model_len=32,
                max_lora_rank=4,
                num_threads=1,
            )
        yield found
    finally:
        for llm in found.values():
            llm.close()


def first_logits(llm: LLM, folder: Path, module_id: int | None) -> torch.Tensor:
    """Return logits of the first token; None: without an adapter."""
    spec = read_config(folder)
    # A single position attends to itself alone, whatever its query and key are.
    begun = {} if spec.encoder is None else {"decoder_prompt": (*spec.encoder.first_ids, 5, 9)}
    sent = {} if module_id is None else one_module(spec, layer_of(spec, module_id), module_id, 1)
    sent |= {} if module_id is None else {"lora_task_id": 1 + module_id}
    (output,) = llm.generate([PROMPT], SAMPLING, **begun, **sent)
    return torch.tensor(output.completions[0].logits[0])


def layer_of(spec: ModelSpec, module_id: int) -> int:
    """Return a layer that has the module itself, and not a shared expert of its ids."""
    return 0 if module_id in DENSE_MLP and spec.encoder is None else 1


def test_every_module_changes_outputs(
    models: Mapping[Path, LLM], mixture: Path, translator: Path
) -> None:
    assert {module.id: module.name for module in LORA_MODULES[: len(TABLE)]} == TABLE
    plain = {folder: first_logits(llm, folder, None) for folder, llm in models.items()}
    outputs: list[torch.Tensor] = []
    for module_id in TABLE:
        folder = translator if module_id in CROSS else mixture
        changed = first_logits(models[folder], folder, module_id)
        difference = (changed - plain[folder]).abs().max() / plain[folder].abs().max()
        assert difference > 1e-3, (module_id, TABLE[module_id])
        assert not any(
            changed.shape == other.shape and torch.equal(changed, other) for other in outputs
        )
        outputs.append(changed)


def test_modules_of_other_models_are_refused(
    models: Mapping[Path, LLM], mixture: Path, translator: Path
) -> None:
    """A module that a base lacks is never dropped."""
    for folder, module_ids in ((mixture, CROSS), (translator, range(13, 18))):
        for module_id in module_ids:
            with pytest.raises(AdapterMismatchError) as refused:
                first_logits(models[folder], folder, module_id)
            assert TABLE[module_id] in refused.value.message
