"""Requests with images in random schedules of an engine over a FakeRunner, each made by its seed.

Few cells, blocks and slots, chunks, prefix hits, preemption, retries of failed steps, plans ahead,
beams, several tenants. Every request must have the output that it has alone.
"""

import hashlib
import random
from collections.abc import Iterator

import msgspec

from loraplex.core.beam_search import BeamSearch
from loraplex.core.image import ImageSpan
from loraplex.core.plan import CacheGroupCapacity, Capacity, ImageCapacity, StepPlan
from loraplex.core.sampling_params import SamplingParams
from loraplex.core.scheduler_settings import BatchSchedulerPolicy, FairShare, SchedulerSettings
from loraplex.core.task import Generate, Pool, PoolKind, Task
from support.fake_blocks import PlanViolation
from support.fake_engine import FakeEngine
from support.fake_runner import FAKE_CAPACITY
from support.fake_search import search_alone

PLACEHOLDER = 39
VOCAB_SIZE = 40
MAX_MODEL_LEN = 48
MAX_IMAGE_TOKENS = 9
PLANTED = {"row_failed", "step_failed"}
"""Errors of failures that a schedule plants."""


def digest_of(number: int, size: int) -> bytes:
    """Return the digest of an image."""
    return hashlib.sha256(b"%d %d" % (number, size)).digest()


def prompt_of(parts: list[int | tuple[int, int]]) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Return a prompt and its images. parts: tokens, and (number, size) of each image."""
    token_ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            token_ids.append(part)
            continue
        number, size = part
        images.append(ImageSpan(len(token_ids), size, digest_of(number, size), (1, 1, size)))
        token_ids += [PLACEHOLDER] * size
    return token_ids, tuple(images)


class ImageSchedule:
    """One schedule. `problems` are what was wrong in it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        settings = self._settings()
        self._max_tokens = settings.max_num_batched_tokens
        self.fakes = FakeEngine(self._capacity(), settings, overlap=self._chance(0.5))
        self._sizes: dict[bytes, int] = {}
        for digest in ("a", "b"):
            self.fakes.register(digest)
        self._fails = self._chance(0.4)
        self.num_spans = 0
        """Number of images in the prompts of all requests."""

    def run(self) -> list[str]:
        """Return what was wrong."""
        try:
            for _ in range(self._random.randint(3, 12)):
                for _ in range(self._random.choice([1, 1, 4])):
                    self._add()
                if self._fails:
                    self._plant_failure()
                self.fakes.step(self._random.choice([0, 1, 2, 5]))
                self.fakes.engine.check()
                if self._chance(0.1):
                    self.fakes.engine.abort(self._random.choice(list(self.fakes.requests)))
            self.fakes.run(3000)
        except (AssertionError, PlanViolation, KeyError) as problem:
            return [f"seed {self._seed}: {type(problem).__name__}: {problem}"]
        assert not self.fakes.engine._scheduler._state.images.num_held
        largest = max((self._num_tokens(plan) for plan in self.fakes.runner.plans), default=0)
        if largest > self._max_tokens:
            return [f"seed {self._seed}: a step of {largest} tokens"]
        found = [problem for i in self.fakes.requests for problem in self._problems(i)]
        return [f"seed {self._seed}: {problem}" for problem in found]

    def _num_tokens(self, plan: StepPlan) -> int:
        """Return the number of tokens of a step, with those of the images that it encodes."""
        return plan.num_tokens + sum(self._sizes[encode.digest] for encode in plan.encoded_images)

    def _chance(self, share: float) -> bool:
        return self._random.random() < share

    def _capacity(self) -> Capacity:
        choice = self._random.choice
        block_size = choice([1, 2, 4, 4, 8])
        num_blocks = choice([64, 96, 200]) // block_size
        images = ImageCapacity(
            PLACEHOLDER, MAX_IMAGE_TOKENS, choice([2, 3, 4]), choice([True, False])
        )
        return msgspec.structs.replace(
            FAKE_CAPACITY,
            block_size=block_size,
            cache_groups=(
                CacheGroupCapacity(num_blocks=num_blocks, num_host_blocks=choice([0, 40])),
            ),
            max_num_seqs=choice([2, 4, 8]),
            num_stages=choice([1, 1, 1, 2]),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            pool_kinds=tuple(PoolKind),
            images=images,
        )

    def _settings(self) -> SchedulerSettings:
        choice = self._random.choice
        return SchedulerSettings(
            max_num_batched_tokens=choice([20, 24, 60]),
            max_prefill_chunk=choice([None, None, 1, 3, 7]),
            shortest_prefill_share=choice([0.5, 0.0, 0.9]),
            batch_scheduler_policy=choice(list(BatchSchedulerPolicy)),
            fair_share=choice([FairShare.TENANT, FairShare.NONE]),
            num_draft_tokens=choice([0, 3]),
            max_draft_ngram=choice([1, 3]),
        )

    def _parts(self) -> list[int | tuple[int, int]]:
        """Few beginnings, so that prompts meet in the prefix cache, and in the midst of images."""
        choice = self._random.choice
        parts: list[int | tuple[int, int]] = [1] * choice([0, 1, 3])
        for _ in range(choice([0, 1, 1, 2])):
            parts.append((choice([0, 1, 2]), choice([1, 4, 6, 9])))
            parts += [2] * choice([0, 0, 1, 3])
        return parts or [3, 4]

    def _task(self) -> Task:
        choice = self._random.choice
        if self._chance(0.15):
            return Pool(choice([PoolKind.LAST, PoolKind.MEAN]))
        beam = BeamSearch(width=2) if self._chance(0.15) else None
        return Generate(
            SamplingParams(
                max_tokens=choice([1, 3, 8]),
                n=1 if beam else choice([1, 1, 2]),
                beam=beam,
                seed=choice([0, 1]),
                logprobs=choice([None, 1]),
                prompt_logprobs=choice([None, None, None, 0]),
                ignore_eos=True,
            )
        )

    def _add(self) -> None:
        prompt, images = prompt_of(self._parts())
        self.num_spans += len(images)
        self._sizes.update((image.digest, image.num_tokens) for image in images)
        adapters = self._random.choice([(), (), ("a",), ("b",)])
        tenant = self._random.choice(["us", "us", "them"])
        self.fakes.add(prompt, *adapters, task=self._task(), tenant=tenant, images=images)

    def _plant_failure(self) -> None:
        runner = self.fakes.runner
        kind = self._random.randrange(8)
        if kind == 0:
            runner.fail_rows()
        elif kind == 1:
            runner.fail_step(early=self._chance(0.5))
        elif kind in (2, 4):
            runner.fail_encodes()
        elif kind == 3 and self.fakes.engine._scheduler.max_in_flight == 1:
            runner.defer_rows()  # no plan ahead has a row that may be deferred

    def _problems(self, request_id: int) -> Iterator[str]:
        fakes = self.fakes
        request, completion = fakes.requests[request_id], fakes.completions[request_id]
        model = fakes.runner.model
        code = completion.error_code
        if code is not None:
            if not (self._fails and code in PLANTED) and not self._is_refused(code):
                yield f"request {request_id} ended with {code}"
            return
        if "abort" in completion.finish_reasons.values():
            return
        if isinstance(request.task, Pool):
            deltas = [delta for output in completion.outputs for delta in output.deltas]
            if b"".join(delta.pooled for delta in deltas) != model.pooled(request):
                yield f"another vector of request {request_id}"
            return
        for index in range(request.sampling.n):
            if request.sampling.beam is not None:
                hypothesis = search_alone(model, request, MAX_MODEL_LEN)[index]
                expected = list(hypothesis.beam.token_ids)
            else:
                expected = fakes.alone(request_id, index)
            if fakes.tokens(request_id, index) != expected:
                yield f"other tokens of request {request_id}"

    def _is_refused(self, code: str) -> bool:
        return code in {"prompt_too_long", "invalid_parameter"}
