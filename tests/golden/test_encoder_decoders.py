"""Encoder-decoder models against transformers and PEFT: adapters of all kinds in one batch."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from loraplex import LLM, SamplingParams
from loraplex.adapters.formats.modules import LORA_MODULES
from loraplex.app.llm_outputs import Generated
from loraplex.core.beam_search import BeamSearch
from loraplex.core.errors import (
    AdapterMismatchError,
    InvalidParameterError,
    PromptTooLongError,
    TokenOutOfVocabularyError,
    UnsupportedFeatureError,
)
from loraplex.models.registry import read_config
from support.encoder_decoders import CASES, random_inputs, save_adapters, save_case
from support.module_rows import one_module

pytestmark = pytest.mark.usefixtures("one_thread")

QUICK = ("flan-t5", "bart")
NUM_NEW_TOKENS = 24
INPUTS = random_inputs((1, 7, 150, 33))
"""Some are longer than all distances that have biases of their own."""
TOLERANCE = 1e-4
"""Relative to the largest logit."""
GREEDY = SamplingParams(
    max_tokens=NUM_NEW_TOKENS, temperature=0.0, ignore_eos=True, return_logits=True
)


@dataclasses.dataclass(frozen=True)
class Subject:
    """One model in both implementations."""

    folder: Path
    references: Mapping[str | None, Any]
    llm: LLM
    first_ids: tuple[int, ...]


def cases() -> list[Any]:
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in QUICK else slow) for name in CASES]


@pytest.fixture(scope="module", params=cases())
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    case = CASES[request.param]
    model = save_case(folder, case)
    references = {None: model, **save_adapters(folder, case)}
    spec = read_config(folder)
    assert spec.encoder is not None
    with LLM(
        folder,
        adapters={name: folder / name for name in case.modules},
        state_dir=folder / "state",
        dtype="float32",
        kv_cache_bytes=1 << 24,
        max_num_seqs=8,
        max_model_len=128,
        max_lora_rank=4,
        num_threads=1,
    ) as llm:
        yield Subject(folder, references, llm, spec.encoder.first_ids)


def expected_tokens(model: Any, given: list[int], **options: Any) -> list[int]:
    num_forced = options.pop("num_forced", 0)
    output = model.generate(
        input_ids=torch.tensor([given]),
        max_new_tokens=NUM_NEW_TOKENS + num_forced,
        do_sample=False,
        eos_token_id=None,
        **options,
    )
    tokens: list[int] = output[0].tolist()
    return tokens


def generated(subject: Subject, sampling: SamplingParams) -> Mapping[tuple[str | None, int], Any]:
    """Complete all inputs with all adapters, and with none, together."""
    keys = [(name, index) for name in subject.references for index in range(len(INPUTS))]
    outputs: list[Generated] = subject.llm.generate(
        [INPUTS[index] for _, index in keys], sampling, adapter=[name for name, _ in keys]
    )
    return dict(zip(keys, outputs, strict=True))


def test_greedy_tokens_and_logits(subject: Subject) -> None:
    num_first = len(subject.first_ids)
    for (name, index), output in generated(subject, GREEDY).items():
        model, given = subject.references[name], INPUTS[index]
        tokens = expected_tokens(model, given, num_beams=1, num_forced=num_first - 1)
        assert tuple(tokens[:num_first]) == subject.first_ids
        assert list(output.token_ids) == tokens[num_first:], (name, index)
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([given]), decoder_input_ids=torch.tensor([tokens[:-1]])
            ).logits[0, num_first - 1 :]
        got = torch.tensor(output.completions[0].logits)
        # A token that is never generated has no logit.
        finite = torch.isfinite(got)
        error = (got - logits)[finite].abs().max() / logits.abs().max()
        assert error < TOLERANCE, (name, index)


def test_beams(subject: Subject) -> None:
    num_first = len(subject.first_ids)
    sampling = SamplingParams(max_tokens=NUM_NEW_TOKENS, ignore_eos=True, beam=BeamSearch(width=4))
    for (name, index), output in generated(subject, sampling).items():
        tokens = expected_tokens(
            subject.references[name], INPUTS[index], num_beams=4, num_forced=num_first - 1
        )
        assert list(output.token_ids) == tokens[num_first:], (name, index)


def test_adapters_change_outputs(subject: Subject) -> None:
    """Check that each adapter matters; otherwise equal outputs would prove little."""
    outputs = generated(subject, GREEDY)
    for index in range(len(INPUTS)):
        found = {repr(outputs[name, index].completions[0].logits[0]) for name in subject.references}
        assert len(found) == len(subject.references)


def test_outputs_alone_are_those_in_company(subject: Subject) -> None:
    """Compare bits of logits, also of later requests whose decoder prompts hit the cache."""
    together = generated(subject, GREEDY)
    for name, index in ((None, 2), ("encoder", 1), ("cross", 3)):
        (alone,) = subject.llm.generate([INPUTS[index]], GREEDY, adapter=name)
        assert alone.token_ids == together[name, index].token_ids
        assert torch.equal(
            torch.tensor(alone.completions[0].logits),
            torch.tensor(together[name, index].completions[0].logits),
        )


def test_a_decoder_prompt_continues_an_output(subject: Subject) -> None:
    (whole,) = subject.llm.generate([INPUTS[1]], GREEDY)
    begun = (*subject.first_ids, *whole.token_ids[:5])
    (rest,) = subject.llm.generate(
        [INPUTS[1]],
        SamplingParams(max_tokens=NUM_NEW_TOKENS - 5, temperature=0.0, ignore_eos=True),
        decoder_prompt=begun,
    )
    assert rest.token_ids == whole.token_ids[5:]


@pytest.mark.parametrize("module_id", range(13))
def test_modules_of_tensorrt_llm_change_outputs(subject: Subject, module_id: int) -> None:
    """Check lora_config rows of the decoder's self-attention, MLP and cross attention."""
    base = read_config(subject.folder)
    sent = one_module(base, 1, module_id, 100 + module_id)
    if not LORA_MODULES[module_id].parts_in(base.layers[1].module_shapes):  # there is no gate
        with pytest.raises(AdapterMismatchError, match="not enabled"):
            subject.llm.generate([INPUTS[1]], GREEDY, **sent)
        assert module_id == 7
        return
    # A single position attends to itself alone, whatever its query and key are.
    begun = (subject.first_ids[0], 5, 9, 11)
    (changed,) = subject.llm.generate([INPUTS[1]], GREEDY, decoder_prompt=begun, **sent)
    (plain,) = subject.llm.generate([INPUTS[1]], GREEDY, decoder_prompt=begun)
    logits = [torch.tensor(each.completions[0].logits[0]) for each in (changed, plain)]
    assert not torch.allclose(*logits, atol=1e-3)


def test_layers_of_tensorrt_llm_are_the_decoders(subject: Subject) -> None:
    """Refuse a layer that only the encoder has, if it has more."""
    base = read_config(subject.folder)
    assert base.encoder is not None
    layer = max(base.num_layers, len(base.encoder.layers))
    with pytest.raises(AdapterMismatchError, match="layerId"):
        subject.llm.generate(
            [INPUTS[1]],
            GREEDY,
            lora_task_id=999,
            lora_weights=torch.randn(1, 4096),
            lora_config=torch.tensor([[9, layer, 1]], dtype=torch.int32),
        )


def test_requests_that_are_refused(subject: Subject) -> None:
    given, start = INPUTS[1], subject.first_ids[0]
    generate = subject.llm.generate
    with pytest.raises(InvalidParameterError) as both:
        generate([given], GREEDY, decoder_prompt=(start, 5), forced_bos_token_id=5)
    assert both.value.param == "forced_bos_token_id"
    with pytest.raises(UnsupportedFeatureError) as scored:
        generate([given], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert scored.value.param == "prompt_logprobs"
    with pytest.raises(TokenOutOfVocabularyError) as unknown:
        generate([given], GREEDY, decoder_prompt=(start, 100_000))
    assert unknown.value.param == "decoder_prompt"
    with pytest.raises(PromptTooLongError) as long:
        generate([given * 4000], GREEDY)
    assert long.value.param == "prompt"
    with pytest.raises(UnsupportedFeatureError):
        subject.llm.embed([given])


def test_a_forced_token_is_not_part_of_the_output(subject: Subject) -> None:
    start = subject.first_ids[0]
    (forced,) = subject.llm.generate([INPUTS[1]], GREEDY, forced_bos_token_id=17)
    (given,) = subject.llm.generate([INPUTS[1]], GREEDY, decoder_prompt=(17,))
    assert forced.token_ids == given.token_ids
    assert forced.prompt_token_ids == (*INPUTS[1], start, 17)
