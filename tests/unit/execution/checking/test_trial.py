"""Steps of the trial run for each kind of model and agree with torch; what they lack is named."""

import contextlib
import json
from collections import Counter
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from loraplex.core.weight_precision import WeightPrecision
from loraplex.execution.checking.stored_forms import StoredForm, stored_forms
from loraplex.execution.checking.trial import MEASURED, Trial, checked_weights, left_out
from loraplex.execution.sizing.kv import windowed
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.weights.stored_head import read_model
from loraplex.kernels.dispatch import select_kernels
from loraplex.kernels.ops import Kernels
from loraplex.kernels.reference import ReferenceKernels
from loraplex.kernels.shadow import Fault, ShadowKernels
from loraplex.models.spec import ModelSpec
from support.families import every
from support.tiny_model import TinyCheckpoint

CPU = torch.device("cpu")
SETTINGS = RunnerSettings(device="cpu", max_lora_rank=8)
INT4, INT8 = WeightPrecision.INT4, WeightPrecision.INT8


class Seen:
    """Implements Observer."""

    def __init__(self) -> None:
        self.passes: Counter[str] = Counter()
        self.faults: dict[str, str] = {}

    def begin(self, op: str) -> None:
        pass

    def passed(self, op: str, difference: float) -> None:
        del difference
        self.passes[op] += 1

    def fell(self, op: str, fault: Fault, detail: str) -> None:
        self.faults[op] = f"{fault}: {detail}"


def spec_of(folder: Path, **config: Any) -> ModelSpec:
    checkpoint = TinyCheckpoint(folder)
    file = checkpoint.folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return windowed(SETTINGS, read_model(checkpoint.folder))


def check(spec: ModelSpec) -> Seen:
    seen = Seen()
    shadow = ShadowKernels(select_kernels(CPU), CPU, seen, is_quantized=True)
    trial = Trial(spec, SETTINGS, cast("Kernels", shadow), None)
    trial.run(records=False)
    trial.close()
    return seen


FORMATS: dict[str, tuple[dict[str, Any], tuple[StoredForm, ...]]] = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        (StoredForm(INT4, 32, has_offsets=True), StoredForm(INT4, 32)),
    ),
    "gptq of 8 bits and whole rows": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1},
        (StoredForm(INT8, 512, has_offsets=True), StoredForm(INT8, 512)),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4},
        (StoredForm(INT4, 128, has_offsets=True), StoredForm(INT4, 128)),
    ),
    "nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
        (StoredForm(INT4, 64, has_table=True),),
    ),
    "int8": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        (StoredForm(INT8, 512),),
    ),
    "compressed": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 64}}},
        },
        (StoredForm(INT4, 64, has_offsets=True), StoredForm(INT4, 64)),
    ),
    "acting in order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, ()),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_checkpoint_is_checked_in_its_own_forms(tmp_path: Path, name: str) -> None:
    config, expected = FORMATS[name]
    spec = spec_of(tmp_path, quantization_config=config)
    assert spec.stored_format is not None
    assert stored_forms(spec.stored_format) == expected
    forms = ", ".join(map(str, expected)) or "widened"
    assert checked_weights(SETTINGS, spec) == f"{spec.stored_format.method}: {forms}"


@pytest.mark.some(2)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_in_these_forms_agree_with_torch(tmp_path: Path, name: str) -> None:
    seen = check(spec_of(tmp_path, quantization_config=FORMATS[name][0]))
    assert not seen.faults
    assert {"linear", "linear_apart", "squared_row_norms"} <= set(seen.passes)


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "architecture", "expected"),
    [
        (
            "deepseek-v2",
            "DeepseekV2ForCausalLM",
            {"latent_attention", "write_latent", "add_heads_lora", "grouped_linear"},
        ),
        (
            "qwen3-next",
            "Qwen3NextForCausalLM",
            {"delta_rule", "causal_conv", "gated_rms_norm", "paged_attention"},
        ),
        (
            "granite-hybrid",
            "GraniteMoeHybridForCausalLM",
            {"ssd", "causal_conv", "gated_rms_norm", "paged_attention"},
        ),
        ("lfm2", "Lfm2ForCausalLM", {"causal_conv", "paged_attention", "add_lora"}),
    ],
)
def test_mixers_of_all_kinds_agree_with_torch(
    tmp_path: Path, name: str, architecture: str, expected: set[str]
) -> None:
    every.CASES[name].config().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"architectures": [architecture]}
    file.write_text(json.dumps(config))
    seen = check(windowed(SETTINGS, read_model(tmp_path)))
    assert not seen.faults
    assert expected <= set(seen.passes)


@pytest.mark.parametrize("forms", [forms for _, forms in FORMATS.values() if forms])
def test_random_weights_are_about_as_large_as_real_ones(forms: tuple[StoredForm, ...]) -> None:
    for form in forms:
        weight = form.random((6, 200), CPU)
        assert 0.005 < float(weight.dequantized().std()) < 0.1
        assert weight.offsets is None or form.has_offsets
        assert (weight.table is not None) is form.has_table


def test_steps_to_measure_are_named_once(tmp_path: Path) -> None:
    names: list[str] = []

    def measuring(name: str) -> contextlib.AbstractContextManager[None]:
        names.append(name)
        return contextlib.nullcontext()

    trial = Trial(spec_of(tmp_path), SETTINGS, ReferenceKernels(CPU), None, MEASURED)
    trial.measure(measuring)
    trial.close()
    assert names == ["decode", "short prompt", "long prompt"]


def test_what_no_trial_does_is_named(tmp_path: Path) -> None:
    spec = spec_of(tmp_path)
    assert left_out(SETTINGS, spec) == ("DoRA and biases of adapters",)
    two = msgspec.structs.replace(SETTINGS, tensor_parallel_size=2, pipeline_parallel_size=2)
    assert left_out(two, spec)[:2] == ("exchanges between ranks", "exchanges between stages")
