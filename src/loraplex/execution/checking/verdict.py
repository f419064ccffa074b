"""What a check of a backend's ops found, kept in a file for the next start."""

import contextlib
import fcntl
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import msgspec
import torch

from loraplex.adapters.durable_files import write_atomically
from loraplex.core.version import __version__
from loraplex.execution.checking.trial import checked_weights, first_layers, trial_settings
from loraplex.execution.checking.tuning import Tuning
from loraplex.execution.sizing.capacity import choose_dtype, choose_kv_dtype
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.shadow import Fault
from loraplex.kernels.sizes import CANDIDATES, DEFAULT_SIZES
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_DRIVER_VERSION: Final = re.compile(r"Kernel Module +(?:for \S+ +)?([0-9][0-9.]*)")
_PACKAGES: Final = ("torch", "triton", "flashinfer-python")


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What was found of one op."""

    op: str
    num_calls: int = 0
    difference: float = 0.0
    """Largest difference to torch, relative to the largest number of a result."""
    fault: Fault | None = None
    """None: torch gives the same."""
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Findings about all ops that a model calls."""

    place: dict[str, str]
    """What the findings depend on: device, versions, and the forms of the model."""
    findings: tuple[Finding, ...]
    attention_backend: str
    """That which the findings are about: the operator's, or what replaces it."""
    seconds: float
    """Time that the check took."""
    tuning: Tuning = Tuning()
    not_checked: tuple[str, ...] = ()
    """What the server does that the check does not, by name."""

    @property
    def fallen(self) -> tuple[Finding, ...]:
        """Return those that torch computes."""
        return tuple(finding for finding in self.findings if finding.fault is not None)

    def report(self, finding: Finding) -> str:
        """Return one line for a report to the developers."""
        fault = f"op {finding.op} {finding.fault}: {finding.detail or 'no message'}"
        return f"{fault} ({self.described_place})"

    @property
    def described_place(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.place.items())


def place_of(settings: RunnerSettings, spec: ModelSpec) -> dict[str, str]:
    """Return what a verdict about the ops of a server depends on. spec: of one rank."""
    device, dtype = torch.device(settings.device), choose_dtype(settings, spec)
    shapes = repr((first_layers(spec).layers, spec.hidden_size, spec.vocab_size))
    versions = {"loraplex": __version__} | {name: _version(name) for name in _PACKAGES}
    return {
        **_device_place(device),
        **versions,
        "dtype": str(dtype),
        "kv_dtype": str(choose_kv_dtype(settings, dtype)),
        "weights": checked_weights(settings, spec),
        "batch_invariant": str(settings.batch_invariant),
        "attention_backend": settings.attention_backend,
        "cuda_graphs": str(settings.cuda_graphs),
        "block_size": str(trial_settings(settings, spec).block_size),
        "max_rank": str(settings.rank_limits.largest),
        "shapes": hashlib.sha256(shapes.encode()).hexdigest()[:12],
        "sizes": hashlib.sha256(repr((DEFAULT_SIZES, CANDIDATES)).encode()).hexdigest()[:12],
    }


def _device_place(device: torch.device) -> dict[str, str]:
    if device.type != "cuda":
        return {"device": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver_version(),
        "cuda": str(torch.version.cuda),
    }


def _driver_version() -> str:
    with contextlib.suppress(OSError):
        found = _DRIVER_VERSION.search(_DRIVER.read_text())
        if found:
            return found[1]
    return "unknown"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


class VerdictFolder:
    """Verdicts of all devices and models, a file for each. Processes may share it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def find(self, place: Mapping[str, str]) -> Verdict | None:
        """Return the verdict about exactly this place; None: there is none that can be read."""
        try:
            verdict = msgspec.json.decode(self._file(place).read_bytes(), type=Verdict)
        except (OSError, msgspec.DecodeError):
            return None
        return verdict if verdict.place == dict(place) else None

    def keep(self, verdict: Verdict) -> bool:
        """Write the verdict. False: that is impossible, and the next start checks again."""
        encoded = msgspec.json.format(msgspec.json.encode(verdict), indent=1)
        try:
            write_atomically(self._file(verdict.place), [encoded])
        except OSError as error:
            logger.warning("the verdict about the kernels cannot be kept: %s", error)
            return False
        return True

    @contextlib.contextmanager
    def alone(self, place: Mapping[str, str]) -> Iterator[None]:
        """Return a block in which no other process is, such as another rank of this place."""
        with contextlib.ExitStack() as held:
            # Without locks, as on some network file systems, two processes check the same.
            with contextlib.suppress(OSError):
                self._path.mkdir(parents=True, exist_ok=True)
                file = self._file(place).with_suffix(".lock")
                lock = held.enter_context(file.open("w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _file(self, place: Mapping[str, str]) -> Path:
        encoded = msgspec.json.encode(sorted(place.items()))
        return self._path / f"{hashlib.sha256(encoded).hexdigest()[:16]}.json"
