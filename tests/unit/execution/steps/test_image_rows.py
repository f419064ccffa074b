"""Images in real steps: a prompt with them has the bits of one with the tokens they stand for."""

import dataclasses
import random

import msgspec
import pytest

from loraplex.core.clock import SystemClock
from loraplex.core.plan import ImageCapacity, RowAdded, RowStep
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import SchedulerSettings
from loraplex.core.task import Generate
from loraplex.engine.engine import build_engine
from loraplex.execution.adapters.host_adapters import HostAdapters
from loraplex.execution.loading import load_parts
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.execution.steps.input_batch import InputBatch
from loraplex.execution.steps.model_runner import ModelRunner
from loraplex.execution.steps.threaded_runner import ThreadedRunner
from support.engine_requests import engine_request
from support.fake_encoder import FakeEncoder
from support.instant_loader import InstantLoader
from support.random_schedules import RecordingSampler
from support.tiny_model import TinyCheckpoint

PLACEHOLDER = 190
MAX_TOKENS = 11
SETTINGS = RunnerSettings(block_size=4, num_blocks=60, max_num_seqs=4, max_lora_rank=8)


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    checkpoint = TinyCheckpoint(
        tmp_path_factory.mktemp("model"),
        hidden_size=64,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=199,
        torch_dtype="float32",
    )
    return load_parts(checkpoint.save(), SETTINGS, HostAdapters())


class Model:
    """Engines over one model, with an encoder."""

    def __init__(self, parts):
        self.encoder = FakeEncoder(parts.decoder._embedding._rows, MAX_TOKENS)
        self._parts = dataclasses.replace(
            parts,
            encoder=self.encoder,
            capacity=msgspec.structs.replace(
                parts.capacity, images=ImageCapacity(PLACEHOLDER, MAX_TOKENS, num_cells=2)
            ),
        )
        self.bits = {}

    def with_images(self, request_id, *inputs):
        """Return a request; inputs: tokens, and texts of digits, which are images."""
        prompt, images = [], []
        for given in inputs:
            if isinstance(given, int):
                prompt.append(given)
                continue
            images.append(self.encoder.image(int(given), len(prompt)))
            prompt += [PLACEHOLDER] * images[-1].num_tokens
        sampling = SamplingParams(temperature=0.0, max_tokens=6, seed=request_id, ignore_eos=True)
        return engine_request(tuple(prompt), sampling, request_id=request_id, images=tuple(images))

    def as_text(self, request):
        """Return the request with the tokens that its images stand for."""
        prompt = list(request.prompt_token_ids)
        for image in request.images:
            prompt[image.first : image.end] = self.encoder.tokens_of(image.digest)
        return msgspec.structs.replace(
            request, prompt_token_ids=tuple(prompt), images=(), kv_salt=b"text"
        )

    def run(self, requests, settings=None, *, overlap=False):
        """Return the tokens of each request, or the code of its error."""
        sampler = RecordingSampler(self._parts.capacity.vocab_size)
        runner = ModelRunner(dataclasses.replace(self._parts, sampler=sampler))
        engine = build_engine(
            ThreadedRunner(runner) if overlap else runner,
            InstantLoader(HostAdapters(), lambda source: None),
            SystemClock(),
            settings or SchedulerSettings(),
            adapter_host_bytes=1 << 20,
            overlap=overlap,
        )
        results = {request.request_id: [] for request in requests}
        waiting = list(requests)
        while waiting or not engine.is_idle:
            if waiting:
                engine.add(waiting.pop(0))
            for output in engine.step().outputs:
                for delta in output.deltas:
                    results[output.request_id] += delta.token_ids
                if output.error is not None:
                    results[output.request_id] = output.error.code
        engine.check()
        self.num_cached_tokens = engine.stats().cached_tokens
        engine.close()
        self.bits = sampler.bits
        return results


@pytest.fixture
def model(parts):
    return Model(parts)


@pytest.mark.parametrize("chunk", [None, 1, 3])
@pytest.mark.parametrize("overlap", [False, True])
def test_images_have_the_bits_of_the_tokens_they_stand_for(model, chunk, overlap):
    requests = [
        model.with_images(1, 5, 6, "1", 7),
        model.with_images(2, "1", 9, "2"),
        model.with_images(3, 5, 6, "1", 8),
        model.with_images(4, *range(20)),
        model.with_images(5, 5, 6, "2", 7),
        model.with_images(6, "1"),
    ]
    text = [model.as_text(request) for request in requests]
    expected = {}
    bits = {}
    for request in text:
        expected |= model.run([request])
        bits |= model.bits
    assert not model.encoder.encoded
    settings = SchedulerSettings(max_prefill_chunk=chunk, max_num_batched_tokens=24)
    assert model.run(requests, settings, overlap=overlap) == expected
    assert model.num_cached_tokens > 0
    for request_id, of_request in bits.items():
        assert {p: model.bits[request_id][p] for p in of_request} == of_request
    assert model.encoder.encoded


def test_random_schedules(model):
    draws = random.Random(3)
    for _ in range(6):
        requests = [
            model.with_images(
                i + 1,
                *draws.choice([(), (5, 6), tuple(range(20))]),
                *draws.choice([("1",), ("2",), ("1", "2"), ("3", 4, "3"), (7,)]),
                *draws.choice([(), (8, 9)]),
            )
            for i in range(8)
        ]
        expected = model.run([model.as_text(request) for request in requests])
        settings = SchedulerSettings(
            max_prefill_chunk=draws.choice([None, 2, 5]), max_num_batched_tokens=24
        )
        assert model.run(requests, settings, overlap=draws.random() < 0.5) == expected


def test_an_image_that_cannot_be_encoded_fails_the_requests_that_read_it_and_no_others(model):
    good, bad = model.with_images(1, 5, "1", 7), model.with_images(2, 5, "2", 7)
    text = model.with_images(3, 5, 6, 7)
    expected = model.run([model.as_text(good), text])
    model.encoder.failing.add(bad.images[0].digest)
    assert model.run([good, bad, text]) == {**expected, 2: "row_failed"}
    model.encoder.failing.clear()
    assert model.run([bad]) == model.run([model.as_text(bad)])


def test_an_encoder_that_gives_too_few_rows_fails_the_requests_that_read_them(model, monkeypatch):
    good, bad = model.with_images(1, 5, 6), model.with_images(2, 5, "2", 7)
    right = model.encoder.encode
    monkeypatch.setattr(model.encoder, "encode", lambda digest: right(digest)[:-1])
    assert model.run([good, bad]) == {**model.run([good]), 2: "row_failed"}


def test_a_model_without_an_encoder_refuses_images_by_name(model, parts):
    request = model.with_images(1, 5, "1", 7)
    model._parts = parts
    assert model.run([request]) == {1: "unsupported_feature"}


def test_ids_outside_the_vocabulary_fail_their_row(model):
    request = msgspec.structs.replace(
        model.with_images(1, 5, 6), prompt_token_ids=(5, 2**62 + 7, 6)
    )
    assert model.run([request, model.with_images(2, 5, 6)])[1] == "row_failed"


def test_rows_of_an_image_follow_the_step_rows_that_are_left(model):
    """A step that is computed again with fewer rows has the images of these."""
    batch = InputBatch(4, 64, 4, reads_images=True)
    image = model.encoder.image(1, 2)
    for slot in range(2):
        batch.add_row(RowAdded(slot, slot, Generate(), 0, (1,) * 16, 16, images=(image,)))
    steps = [
        RowStep(slot, 0, 4, (1,) * 4, new_block_ids=((slot,),), image_cells=(slot,))
        for slot in range(2)
    ]
    inputs = batch.prepare(steps)
    assert [tuple(span) for span in inputs.encoded_spans] == [(2, 2, 0, 0), (6, 2, 1, 0)]
    assert [tuple(span) for span in inputs.of_rows([1]).encoded_spans] == [(2, 2, 1, 0)]
