"""Prompts with images have the output that they have alone, in random schedules of an engine.

The fake encoder's rows are a function of the image, and the state of each position one of all
inputs up to it. Planted bugs show that the schedules would find what is wrong.
"""

from collections.abc import Callable

import pytest

from loraplex.memory import kv_blocks, prefix_cache
from loraplex.memory.image_cells import ImageCells
from loraplex.scheduling import request as request_module
from loraplex.scheduling.plan_builder import PlanBuilder
from loraplex.scheduling.request import Request, Sequence
from loraplex.scheduling.scheduler import RequestFactory, Scheduler
from loraplex.scheduling.state import SchedulerState
from support.examples import num_examples
from support.image_schedules import ImageSchedule

NUM_FOR_A_BUG = 300
"""Schedules of which one must show each planted bug."""


def check(seeds: range) -> None:
    problems: list[str] = []
    num_spans = num_encoded = num_cached = num_preempted = 0
    for seed in seeds:
        schedule = ImageSchedule(seed)
        problems += schedule.run()
        stats = schedule.fakes.engine.stats()
        num_spans += schedule.num_spans
        num_encoded += schedule.fakes.runner.num_encoded
        num_cached += stats.cached_tokens
        num_preempted += stats.preemptions
    assert not problems, "\n".join(problems[:10])
    assert 0 < num_encoded < num_spans, "images are encoded, and their rows used again"
    assert num_cached > 0
    assert num_preempted > 0


def test_outputs_are_those_of_requests_alone() -> None:
    check(range(num_examples(2)))


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_many_schedules() -> None:
    check(range(1_000_000, 1_030_000))


def _is_cut(patch: pytest.MonkeyPatch) -> None:
    """Chunks and budgets cut whole images."""
    patch.setattr(RequestFactory, "_set_spans", lambda self, request: None)


def _of_another_image(patch: pytest.MonkeyPatch) -> None:
    """Blocks are found by the placeholders alone."""
    patch.setattr(request_module, "image_salts", lambda salt, images: ())


def _in_later_blocks_only(patch: pytest.MonkeyPatch) -> None:
    """The block in which an image begins is found without its digest."""
    right = kv_blocks.salt_before

    def wrong(end: int, salt: bytes, later_salts: kv_blocks.LaterSalts) -> bytes:
        return right(end - 3, salt, later_salts)

    patch.setattr(kv_blocks, "salt_before", wrong)
    patch.setattr(prefix_cache, "salt_before", wrong)


def _of_another_tenant(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Request, "image_key", lambda self, image: (b"", image.digest))


def _never_encoded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Sequence, "encode", lambda self, num_tokens: ())


def _encoded_too_late(patch: pytest.MonkeyPatch) -> None:
    """An image is encoded by the next step that encodes one."""
    right, late = PlanBuilder._encode, []

    def wrong(self: PlanBuilder, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        cells = right(self, sequence, num_tokens)
        now, self._encodes[:] = list(self._encodes), late
        late[:] = now
        return cells

    patch.setattr(PlanBuilder, "_encode", wrong)


def _freed_too_early(patch: pytest.MonkeyPatch) -> None:
    """The first chunk frees the cells of all images, although later ones read them."""
    right = SchedulerState.release_images

    def wrong(self: SchedulerState, sequence: Sequence, num_computed: int | None = None) -> None:
        cells = dict(sequence.image_cells)
        right(self, sequence)
        ends = {image.first: image.end for image in sequence.request.images}
        if num_computed is not None:
            left = {first: cells[first] for first in cells if ends[first] > num_computed}
            sequence.image_cells = left

    patch.setattr(SchedulerState, "release_images", wrong)


def _kept_although_the_step_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ImageCells, "lose", lambda self, cell_id: None)


def _kept_although_the_encoder_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_lose_images", lambda self, plan, result: None)


def _not_in_the_budget(patch: pytest.MonkeyPatch) -> None:
    right = Sequence.num_to_encode
    patch.setattr(Sequence, "num_to_encode", lambda self, num: min(1, right(self, num)))


@pytest.mark.parametrize(
    "plant",
    [
        _is_cut,
        _of_another_image,
        _in_later_blocks_only,
        _of_another_tenant,
        _never_encoded,
        _encoded_too_late,
        _freed_too_early,
        _kept_although_the_step_failed,
        _kept_although_the_encoder_failed,
        _not_in_the_budget,
    ],
)
def test_planted_bugs_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert any(ImageSchedule(seed).run() for seed in range(NUM_FOR_A_BUG)), "a bug was not found"
