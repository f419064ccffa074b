"""The double is late where a GPU may be, and reports where a GPU would be silently wrong."""

import pytest
import torch

from support.delayed_accelerator import DelayedAccelerator
from support.naming import naming


def filled(accelerator: DelayedAccelerator, value: float) -> torch.Tensor:
    buffer = accelerator.pinned((4,), torch.float32)
    buffer.fill_(value)
    return buffer


def test_a_copy_beside_the_steps_is_late_until_its_event_is_waited_for() -> None:
    accelerator = DelayedAccelerator()
    host, device = filled(accelerator, 3), torch.zeros(4)
    with accelerator.copies():
        accelerator.copy(host, device)
        event = accelerator.event()
    assert device.isnan().all()
    event.wait()
    assert (device == 3).all()


def test_has_passed_is_true_after_some_calls_and_only_of_what_is_before_the_event() -> None:
    accelerator = DelayedAccelerator(most_polls=5)
    first, second = torch.zeros(4), torch.zeros(4)
    host = filled(accelerator, 1)
    with accelerator.copies():
        accelerator.copy(host, first)
        event = accelerator.event()
        accelerator.copy(host, second)
    polls = [event.has_passed() for _ in range(7)]
    assert polls == sorted(polls)
    assert polls[-1]
    assert (first == 1).all()
    assert second.isnan().all()


def test_what_comes_after_an_event_of_the_other_queue_waits_for_it() -> None:
    accelerator = DelayedAccelerator()
    host, device = filled(accelerator, 2), torch.zeros(4)
    with accelerator.copies():
        accelerator.copy(host, device)
        arrived = accelerator.event()
    back = accelerator.pinned((4,), torch.float32)
    with accelerator.compute():
        accelerator.after(arrived)
        assert (device == 2).all()
        accelerator.copy(device, back)
        read = accelerator.event()
    device.fill_(5)
    newer = filled(accelerator, 9)
    with accelerator.copies():
        accelerator.after(read)
        accelerator.copy(newer, device)
    assert (device == 5).all(), "it may not begin yet"
    accelerator.advance(1)
    assert (back == 2).all(), "what it was when the copy was enqueued"
    accelerator.synchronize()
    assert (device == 9).all()
    assert accelerator.num_outstanding == 0


def test_a_result_is_rubbish_on_the_host_until_it_is_waited_for() -> None:
    accelerator = DelayedAccelerator(most_polls=0)
    tokens, back = torch.tensor([4, 5]), accelerator.pinned((2,), torch.int64)
    with accelerator.compute():
        accelerator.copy(tokens, back)
        event = accelerator.event()
    assert back.tolist() == [-1, -1]
    assert event.has_passed()
    assert back.tolist() == [4, 5]


@pytest.mark.parametrize("queue", ["compute", "copies"])
def test_a_staging_buffer_that_is_used_again_too_early_is_reported(queue: str) -> None:
    accelerator = DelayedAccelerator()
    host, device = filled(accelerator, 1), torch.zeros(4)
    with getattr(accelerator, queue)():
        accelerator.copy(host, device)
        event = accelerator.event()
    host[2] = 7
    with pytest.raises(AssertionError, match=naming("pinned")):
        event.wait()


def test_a_staging_buffer_may_be_dropped_as_torch_s_may() -> None:
    accelerator = DelayedAccelerator()
    device = torch.zeros(4)
    with accelerator.copies():
        accelerator.copy(filled(accelerator, 1), device)
    accelerator.synchronize()
    assert (device == 1).all()


def test_work_outside_both_queues_is_reported() -> None:
    accelerator = DelayedAccelerator()
    with pytest.raises(AssertionError, match="within"):
        accelerator.event()
    with pytest.raises(AssertionError, match="within"):
        accelerator.copy(torch.zeros(1), torch.zeros(1))
