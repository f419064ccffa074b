"""Ranks exchange the same bytes in every round, and an abort ends every wait."""

import hashlib
import mmap
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from loraplex.core.errors import DeviceLost, InternalError
from loraplex.kernels.channel import tree_sum
from loraplex.kernels.native.channel import Segment, SegmentAddress, SharedMemoryChannel
from loraplex.kernels.native.library import LIBRARY_FOLDER, NativeLibrary, load_library
from support.eventually import eventually
from support.naming import naming
from support.ranks import RankFailed, RankProcesses, run_ranks

SLOT_BYTES = 256
LENGTHS = (1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, 5 * SLOT_BYTES, 7, 0)

pytestmark = pytest.mark.skipif(
    not LIBRARY_FOLDER.exists(), reason="loraplex was installed without a compiler"
)


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return load_library()


@pytest.fixture
def segment(library: NativeLibrary) -> Segment:
    return Segment(library, 2, SLOT_BYTES)


@pytest.fixture
def pair(
    library: NativeLibrary, segment: Segment
) -> tuple[SharedMemoryChannel, SharedMemoryChannel]:
    """Two ranks in this process."""
    first, second = (SharedMemoryChannel(library, segment.address, rank) for rank in range(2))
    return first, second


def message(round_number: int, rank: int, length: int) -> torch.Tensor:
    return (torch.arange(length) * (rank + 3) + round_number).to(torch.uint8)


def exchange_rounds(num_rounds: int) -> Callable[[SharedMemoryChannel], str]:
    """Return a rank's code: rounds of all lengths at random times. Its result is their digest."""

    def body(channel: SharedMemoryChannel) -> str:
        chance, digest = random.Random(channel.rank), hashlib.sha256()
        for number in range(num_rounds):
            length = LENGTHS[number % len(LENGTHS)]
            if chance.random() < 0.05:
                time.sleep(chance.random() / 2000)
            gathered = channel.gather(message(number, channel.rank, length))
            for rank, tensor in enumerate(gathered):
                assert torch.equal(tensor, message(number, rank, length)), (number, rank)
                digest.update(tensor.numpy().tobytes())
        return digest.hexdigest()

    return body


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_see_the_same_bytes(library: NativeLibrary, size: int) -> None:
    assert len(set(run_ranks(library, size, exchange_rounds(300), SLOT_BYTES))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_see_the_same_bytes_in_many_rounds(library: NativeLibrary, size: int) -> None:
    assert len(set(run_ranks(library, size, exchange_rounds(10_000), SLOT_BYTES))) == 1


def test_tensors_of_every_type_and_shape(library: NativeLibrary) -> None:
    tensors = [
        torch.tensor(7),
        torch.rand(3, 50),
        torch.rand(2, 5).bfloat16(),
        torch.rand(5) > 0.5,
        torch.empty(0, 4),
    ]

    def body(channel: SharedMemoryChannel) -> bool:
        return all(
            torch.equal(gathered, tensor)
            for tensor in tensors
            for gathered in channel.gather(tensor)
        )

    assert run_ranks(library, 2, body, SLOT_BYTES) == [True, True]


def num_sleeping(segment: Segment) -> int:
    """Return how many ranks sleep until another publishes (src/channel_rounds.h)."""
    head_bytes, rank_bytes, offset = 1024, 64, 4
    with Path(segment.address.path).open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    starts = (head_bytes + rank * rank_bytes + offset for rank in range(segment.address.size))
    return sum(int.from_bytes(memory[start : start + 4], "little") for start in starts)


def wait_for_a_rank_that_never_comes(channel: SharedMemoryChannel) -> str:
    if channel.rank == channel.size - 1:
        signal.pause()
    with pytest.raises(DeviceLost) as lost:
        channel.gather(torch.zeros(1))
    return str(lost.value)


def test_an_abort_wakes_sleepers(library: NativeLibrary) -> None:
    with RankProcesses(library, 3, wait_for_a_rank_that_never_comes) as ranks:
        assert eventually(lambda: num_sleeping(ranks.segment) == 2)
        ranks.channel.abort("rank 2 takes too long")
        for rank in (0, 1):
            reason = "the ranks' exchange was aborted: rank 2 takes too long"
            assert ranks.result(rank) == reason
        assert num_sleeping(ranks.segment) == 0


def test_an_abort_ends_the_wait_for_a_killed_rank(library: NativeLibrary) -> None:
    with RankProcesses(library, 3, wait_for_a_rank_that_never_comes) as ranks:
        killed = ranks.processes[2]
        assert killed.pid is not None
        os.kill(killed.pid, signal.SIGKILL)
        killed.join()
        ranks.channel.abort("rank 2 was killed")
        assert all("rank 2 was killed" in ranks.result(rank) for rank in (0, 1))
        with pytest.raises(RankFailed, match=naming(2)):
            ranks.result(2)


def test_a_rank_that_fails_ends_the_others(library: NativeLibrary) -> None:
    def body(channel: SharedMemoryChannel) -> None:
        channel.gather(torch.zeros(1))
        if channel.rank == 1:
            raise ValueError("a broken weight")
        channel.gather(torch.zeros(1))

    with RankProcesses(library, 2, body) as ranks:
        with pytest.raises(
            RankFailed,
            match=naming(
                "DeviceLost", "rank 1", "a broken weight", 0, "channel.gather", "torch.zeros"
            ),
        ):
            ranks.result(0)
        with pytest.raises(RankFailed, match="ValueError: a broken weight"):
            ranks.result(1)


def test_an_abort_ends_a_wait_at_any_moment(library: NativeLibrary) -> None:
    """Before the wait, while it spins, as it falls asleep, and asleep."""
    for microseconds in (*range(0, 120, 3), 1000):
        segment = Segment(library, 2, SLOT_BYTES)
        waiting, aborting = (
            SharedMemoryChannel(library, segment.address, rank) for rank in range(2)
        )
        ready, reasons = threading.Barrier(2), []

        def wait(
            channel: SharedMemoryChannel, ready: threading.Barrier, reasons: list[str]
        ) -> None:
            ready.wait()
            try:
                channel.gather(torch.zeros(1))
            except DeviceLost as lost:
                reasons.append(str(lost))

        thread = threading.Thread(target=wait, args=(waiting, ready, reasons))
        thread.start()
        ready.wait()
        end = time.perf_counter() + microseconds / 1e6
        while time.perf_counter() < end:
            pass
        aborting.abort("enough")
        thread.join()
        assert reasons == ["the ranks' exchange was aborted: enough"]


def test_an_abort_stays_with_its_first_reason(
    pair: tuple[SharedMemoryChannel, SharedMemoryChannel],
) -> None:
    first, second = pair
    assert first.abort_reason == ""
    second.abort("the first of two")
    second.abort("the second")
    assert first.abort_reason == second.abort_reason == "the first of two"
    for channel in pair:
        with pytest.raises(DeviceLost, match=naming("first")):
            channel.gather(torch.zeros(1))


def test_a_long_reason_is_cut(pair: tuple[SharedMemoryChannel, SharedMemoryChannel]) -> None:
    pair[0].abort("é" * 10_000)
    assert pair[1].abort_reason.startswith("ééé")
    assert 400 < len(pair[1].abort_reason) < 1000


def test_ranks_that_publish_different_numbers_of_bytes(library: NativeLibrary) -> None:
    def body(channel: SharedMemoryChannel) -> str:
        with pytest.raises(InternalError) as refused:
            channel.gather(torch.zeros(2 + channel.rank))
        return refused.value.message

    for refusal in run_ranks(library, 2, body):
        assert "the ranks exchange different numbers of bytes" in refusal


def test_the_time_of_waiting_is_counted(
    pair: tuple[SharedMemoryChannel, SharedMemoryChannel],
) -> None:
    first, second = pair
    thread = threading.Thread(target=first.gather, args=(torch.zeros(1),))
    thread.start()
    time.sleep(0.05)
    second.gather(torch.zeros(1))
    thread.join()
    assert first.wait_seconds > 0.04
    assert second.wait_seconds < first.wait_seconds


@pytest.mark.parametrize(
    ("size", "slot_bytes"), [(0, 64), (-1, 64), (65, 64), (2, 0), (2, 100), (2, 1 << 31)]
)
def test_wrong_sizes(library: NativeLibrary, size: int, slot_bytes: int) -> None:
    with pytest.raises(InternalError, match=naming(size, slot_bytes)):
        Segment(library, size, slot_bytes)


@pytest.mark.parametrize(
    ("size", "slot_bytes", "rank"), [(3, 256, 0), (2, 320, 0), (2, 256, 2), (2, 256, -1)]
)
def test_a_segment_that_is_divided_in_another_way(
    library: NativeLibrary, segment: Segment, size: int, slot_bytes: int, rank: int
) -> None:
    address = SegmentAddress(segment.address.path, size, slot_bytes)
    with pytest.raises(
        InternalError,
        match=naming(2176, "rank", rank, size, slot_bytes),
    ):
        SharedMemoryChannel(library, address, rank)


def test_a_segment_that_is_gone(library: NativeLibrary, segment: Segment) -> None:
    segment.close()
    with pytest.raises(InternalError, match=naming(segment.address.path, "[Errno 2]")):
        SharedMemoryChannel(library, segment.address, 0)


def test_the_size_of_a_segment_is_sealed(segment: Segment) -> None:
    for num_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.truncate(segment.address.path, num_bytes)


def test_the_memory_goes_when_all_ranks_close(library: NativeLibrary) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:loraplex-channel")

    before = mappings()
    with Segment(library, 2) as segment:
        channels = [SharedMemoryChannel(library, segment.address, rank) for rank in range(2)]
    assert mappings() == before + 2
    for channel in channels:
        channel.close()
        channel.close()
        channel.abort("too late")
        assert (channel.abort_reason, channel.wait_seconds) == ("", 0.0)
        with pytest.raises(AssertionError, match=naming("channel")):
            channel.gather(torch.zeros(1))
    assert mappings() == before


def test_ranks_are_added_as_a_tree() -> None:
    shares = [torch.tensor([value]) for value in (1.0, 2.0**-24, 2.0**-24, 2.0**-23)]
    assert tree_sum(shares[:1]) is shares[0]
    for count in (2, 3, 4):
        left, right = tree_sum(shares[:2]), shares[2:count]
        expected = left + (right[0] + right[1] if count == 4 else right[0]) if right else left
        assert torch.equal(tree_sum(shares[:count]), expected)
    assert tree_sum(shares) != sum(shares)
    # A rank that has two of four shares sends their sum.
    assert torch.equal(tree_sum(shares), tree_sum([tree_sum(shares[:2]), tree_sum(shares[2:])]))
