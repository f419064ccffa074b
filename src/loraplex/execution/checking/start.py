"""The check of a backend's ops at the start of a server, once for each card and versions."""

import importlib.util
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import torch

from loraplex.core.environment import cache_directory
from loraplex.execution.checking.checker import CheckFailed, check_ops
from loraplex.execution.checking.process import CheckRequest
from loraplex.execution.checking.verdict import Finding, Verdict, VerdictFolder, place_of
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.shadow import Fault
from loraplex.kernels.torch_ops import RECORDED_STEPS, with_partners
from loraplex.models.linear_group import TensorShard
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_FLASHINFER: Final = "flashinfer"
_ATTENTION: Final = with_partners(("paged_attention",))

CheckOps = Callable[[CheckRequest], tuple[Finding, ...]]


def verdict_folder() -> VerdictFolder:
    return VerdictFolder(cache_directory() / "kernels")


def is_checked(kernel_check: str, device: torch.device) -> bool:
    """Return whether a start needs a verdict: on a GPU, unless the operator decides otherwise."""
    return kernel_check == "on" or (kernel_check == "auto" and device.type == "cuda")


def find_verdict(
    folder: Path,
    settings: RunnerSettings,
    spec: ModelSpec,
    place: TensorShard,
    verdicts: VerdictFolder,
    *,
    is_fresh: bool = False,
    check: CheckOps = check_ops,
) -> Verdict:
    """Return what is known of the ops that the model in `folder` calls, or check them.

    spec: this rank's. is_fresh: check again, whatever is known. Raises CheckFailed.
    """
    key = place_of(settings, spec)
    with verdicts.alone(key):
        known = None if is_fresh else verdicts.find(key)
        if known is not None:
            return known
        logger.info("checking the kernels, once for this device, these versions and this model")
        request = CheckRequest(
            folder=str(folder),
            settings=msgspec.structs.replace(settings, logits_dir=None),
            rank=place.rank,
            num_ranks=place.size,
            num_threads=torch.get_num_threads(),
        )
        start = time.monotonic()
        findings, backend = _checked(request, check)
        verdict = Verdict(
            place=key,
            findings=findings,
            attention_backend=backend,
            seconds=round(time.monotonic() - start, 1),
        )
        verdicts.keep(verdict)
    return verdict


def _checked(request: CheckRequest, check: CheckOps) -> tuple[tuple[Finding, ...], str]:
    """Return the findings, and the backend of attention that they are about.

    Where FlashInfer falls, Triton is next, and torch the last.
    """
    settings = request.settings
    findings, backend = check(request), settings.attention_backend
    is_choice = backend == "auto" and importlib.util.find_spec(_FLASHINFER) is not None
    if is_choice and not _ATTENTION.isdisjoint(_fallen(findings)):
        backend = "triton"
        settings = msgspec.structs.replace(settings, attention_backend=backend)
        findings = check(msgspec.structs.replace(request, settings=settings))
    return findings, backend


def _fallen(findings: tuple[Finding, ...]) -> list[str]:
    return [finding.op for finding in findings if finding.fault is not None]


def start_verdict(
    folder: Path,
    settings: RunnerSettings,
    spec: ModelSpec,
    place: TensorShard,
    device: torch.device,
) -> Verdict | None:
    """Return the verdict that a server starts with, and log what it replaces.

    device: where it computes. None: its own ops are taken as they are, because nothing is checked
    or nothing could be.
    """
    if not is_checked(settings.kernel_check, device):
        return None
    try:
        verdict = find_verdict(folder, settings, spec, place, verdict_folder())
    except CheckFailed as error:
        logger.warning("the kernels could not be checked, and are used as they are: %s", error)
        return None
    for finding in verdict.fallen:
        logger.warning(
            "kernel %s %s on this device: %s; please report this line: %s",
            finding.op,
            "is wrong" if finding.fault is Fault.WRONG else finding.fault,
            replacement(finding.op),
            verdict.report(finding),
        )
    return verdict


def replacement(op: str) -> str:
    """Return what is done instead of an op that fell."""
    if op == RECORDED_STEPS:
        return "steps are computed op by op, more slowly"
    return "torch computes it instead, more slowly"
