"""Part d: how long the first token of an adapter takes, from where the adapter is."""

import functools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from gpu.card import arrival_bandwidth
from gpu.engines import bytes_on_host, make_engine, request_of
from gpu.journal import CellJournal, Figures
from gpu.models import adapter_bytes, decoder_config
from gpu.rig import Rig, RigSettings, lora_targets, start_seconds
from loraplex.adapters.canonical import (
    CanonicalRow,
    RowKind,
    digest,
    write_canonical,
)
from loraplex.adapters.state_files import canonical_path
from loraplex.adapters.tensor_file import RawTensor
from loraplex.bench.report import markdown_table
from loraplex.bench.workload import PlannedRequest
from loraplex.core.adapter import AdapterSource, Residency
from loraplex.engine.engine import Engine
from loraplex.execution.adapters.loader import FileAdapterLoader
from loraplex.models.spec import ModelSpec

_PROMPT_TOKENS = 8
_PLACES = ("device", "host", "file in the page cache", "disk")


class Plan(msgspec.Struct, frozen=True):
    model: str
    dtype: str
    kinds: tuple[tuple[int, str], ...]
    others: int
    """Adapters that push one out of the device's memory: it holds about as many."""
    repeats: int


FULL = Plan("llama-3.1-8b", "bfloat16", ((16, "qkv"), (16, "all"), (64, "all")), 4, 5)
TINY = Plan("tiny", "float32", ((4, "all"),), 2, 2)


def run(journal: CellJournal, device: torch.device, plan: Plan) -> None:
    bandwidth = {"bytes_per_second": 0.0}
    cell = journal.measure("arrival", lambda: {"bytes_per_second": arrival_bandwidth(device)})
    bandwidth = cell.figures if cell else bandwidth
    for kind in plan.kinds:
        if not journal.begins(_keys(kind), start_seconds(device)):
            continue
        with tempfile.TemporaryDirectory(dir=".") as folder:
            _run_kind(journal, device, plan, kind, Path(folder))


def keys(plan: Plan) -> list[str]:
    return ["arrival", *(key for kind in plan.kinds for key in _keys(kind))]


def _keys(kind: tuple[int, str]) -> list[str]:
    return [f"{_name(kind)} {place}" for place in _PLACES]


def _name(kind: tuple[int, str]) -> str:
    return f"r{kind[0]} {kind[1]}"


def _run_kind(
    journal: CellJournal, device: torch.device, plan: Plan, kind: tuple[int, str], folder: Path
) -> None:
    config, itemsize = decoder_config(plan.model, plan.dtype), getattr(torch, plan.dtype).itemsize
    size = adapter_bytes(config, *kind, itemsize)
    rig = Rig(
        RigSettings(
            model=plan.model,
            device=device,
            dtype=plan.dtype,
            max_num_seqs=4,
            max_model_len=64,
            num_kv_tokens=256,
            lora_bytes=plan.others * adapter_bytes(config, kind[0], "all", itemsize),
            max_rank=kind[0],
        )
    )
    files = [write_adapter(folder, config, kind, number) for number in range(2 * plan.others + 1)]
    loader = FileAdapterLoader(rig.host, rig.runner.prepare_adapter)
    engine = make_engine(rig, bytes_on_host(device), loader)
    try:
        bench = _Loads(engine, files)
        bench.first_token(None)  # the base model: what is compiled at its first use
        bench.first_token(1)
        for place in _PLACES:
            work = functools.partial(_figures, bench, place, plan.repeats, size)
            journal.measure(f"{_name(kind)} {place}", work, seconds=20)
    finally:
        engine.close()
        loader.close()


def _figures(bench: "_Loads", place: str, repeats: int, size: int) -> Figures:
    """size: bytes of the adapter."""
    seconds = [bench.measure(place) for _ in range(repeats)]
    return {
        "seconds": statistics.median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "bytes": size,
    }


class _Loads:
    """Move adapter 0 to one of the places, then request it."""

    def __init__(self, engine: Engine, files: Sequence[AdapterSource]) -> None:
        self._engine = engine
        self._files = files
        self._digests = [source.digest for source in files]
        self._num_requests = 0
        for source in files:
            engine.register_adapter(source)

    def measure(self, place: str) -> float:
        """Seconds from the request to its first token."""
        match place:
            case "device":
                self.first_token(0)
            case "host":
                self.first_token(0)
                self._push_out()
                self._expect({Residency.HOST, Residency.ABSENT})
            case _:
                self._forget()
                if place == "disk":
                    drop_from_page_cache(Path(self._files[0].path))
                else:
                    Path(self._files[0].path).read_bytes()
        return self.first_token(0)

    def first_token(self, adapter: int | None) -> float:
        request = request_of(
            self._num_requests,
            PlannedRequest(tuple(range(1, 1 + _PROMPT_TOKENS)), 1, adapter, 0.0),
            self._digests,
        )
        self._num_requests += 1
        start = time.perf_counter()
        self._engine.add(request)
        while True:
            for output in self._engine.step().outputs:
                assert output.error is None, output.error
                if output.finished:
                    seconds = time.perf_counter() - start
                    self._settle()
                    return seconds

    def _push_out(self) -> None:
        for number in range(1, len(self._files)):
            self.first_token(number)

    def _forget(self) -> None:
        self._settle()
        self._engine.forget_adapter(self._digests[0])
        self._settle()
        self._engine.register_adapter(self._files[0])
        self._expect({Residency.ABSENT})

    def _expect(self, places: set[Residency]) -> None:
        activity = self._engine.adapter_activity()
        place = activity.residency.get(self._digests[0], Residency.ABSENT)
        assert place in places, f"the adapter is {place}, not in {places}"

    def _settle(self) -> None:
        while not self._engine.is_idle:
            self._engine.step()


def write_adapter(
    folder: Path, config: ModelSpec, kind: tuple[int, str], number: int
) -> AdapterSource:
    """A canonical adapter file of 16-bit numbers, as the staging worker writes it."""
    draws = torch.Generator().manual_seed(number)
    targets = lora_targets(config, *kind)

    def tensor(*shape: int) -> RawTensor:
        values = (torch.randn(shape, generator=draws) / 100).to(torch.float16)
        return RawTensor("F16", shape, memoryview(values.numpy().tobytes()))

    rows = [
        CanonicalRow(
            target.layer,
            target.module,
            None,
            RowKind.LORA,
            1.0,
            {
                "a": tensor(target.rank, target.in_features),
                "b": tensor(target.out_features, target.rank),
            },
        )
        for target in targets
    ]
    name = digest(rows)
    path = canonical_path(folder, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_canonical(rows, name, path)
    num_bytes = sum(target.num_elements for target in targets) * 2
    return AdapterSource(name, str(path), num_bytes, targets)


def drop_from_page_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def table(journal: CellJournal, plan: Plan) -> str:
    rows = []
    arrival = journal.cells.get("arrival")
    speed = arrival.figures["bytes_per_second"] if arrival else None
    for kind in plan.kinds:
        warm = journal.cells.get(f"{_name(kind)} device")
        for place in _PLACES:
            cell = journal.cells.get(f"{_name(kind)} {place}")
            if cell is None or cell.missing:
                continue
            found = cell.figures
            added = found["seconds"] - warm.figures["seconds"] if warm and not warm.missing else 0.0
            floor = "" if not speed or place == "device" else f"{1e3 * found['bytes'] / speed:.2f}"
            rows.append(
                (
                    _name(kind),
                    place,
                    f"{1e3 * found['seconds']:.2f}",
                    f"{1e3 * added:.2f}",
                    floor,
                    f"{1e3 * found['least']:.2f} to {1e3 * found['most']:.2f}",
                )
            )
    head = ("adapter", "from", "first token ms", "of it the load", "copy alone ms", "range ms")
    return markdown_table(head, rows)
