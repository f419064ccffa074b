"""The check of a backend's ops at the start of a server, once for each card and versions."""

import importlib.util
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import torch

from loraplex.core.engine_settings import EngineSettings
from loraplex.core.environment import kernel_check_directory
from loraplex.execution.checking.checker import CheckFailed, CheckResult, check_ops
from loraplex.execution.checking.process import CheckRequest
from loraplex.execution.checking.trial import left_out
from loraplex.execution.checking.tuning import Tuning
from loraplex.execution.checking.verdict import Verdict, VerdictFolder, place_of
from loraplex.execution.sizing.settings import RunnerSettings
from loraplex.kernels.shadow import Fault
from loraplex.kernels.torch_ops import RECORDED_STEPS, with_partners
from loraplex.models.linear_group import TensorShard
from loraplex.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_FLASHINFER: Final = "flashinfer"
_ATTENTION: Final = with_partners(("paged_attention",))

CheckOps = Callable[[CheckRequest], CheckResult]


def verdict_folder(settings: EngineSettings) -> VerdictFolder:
    """Return the folder that serving chose; of a runner without a server the default one."""
    return VerdictFolder(kernel_check_directory(settings.kernel_check_dir, ""))


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
        found, backend = _checked(request, check)
        verdict = Verdict(
            place=key,
            findings=found.findings,
            attention_backend=backend,
            seconds=round(time.monotonic() - start, 1),
            tuning=found.tuning,
            not_checked=left_out(settings, spec),
        )
        if not verdicts.keep(verdict) and verdict.tuning.sizes:
            # The next start may measure otherwise: it would resume requests with other bits.
            verdict = msgspec.structs.replace(
                verdict, tuning=_unused(found.tuning, "the result cannot be kept")
            )
    return verdict


def _checked(request: CheckRequest, check: CheckOps) -> tuple[CheckResult, str]:
    """Return what is found, and the backend of attention that it is about.

    Where FlashInfer falls, Triton is next, and torch the last. Sizes that were chosen are checked
    as ours were, in another process: they were measured in fewer steps.
    """
    settings = request.settings
    request = msgspec.structs.replace(request, tunes=torch.device(settings.device).type == "cuda")
    found, backend = check(request), settings.attention_backend
    is_choice = backend == "auto" and importlib.util.find_spec(_FLASHINFER) is not None
    if is_choice and not _ATTENTION.isdisjoint(_fallen(found)):
        backend = "triton"
        settings = msgspec.structs.replace(settings, attention_backend=backend)
        request = msgspec.structs.replace(request, settings=settings)
        found = check(request)
    if not found.tuning.sizes:
        return found, backend
    chosen = msgspec.structs.replace(
        request, tunes=False, sizes=found.tuning.sizes, fallen=tuple(_fallen(found))
    )
    try:
        fallen = set(_fallen(check(chosen))) - set(_fallen(found))
        problem = f"with them {', '.join(sorted(fallen))} failed" if fallen else ""
    except CheckFailed as error:
        problem = f"they could not be checked: {error}"
    if problem:
        found = found._replace(tuning=_unused(found.tuning, problem))
    return found, backend


def _unused(tuning: Tuning, problem: str) -> Tuning:
    """Return what was measured, without the choice."""
    not_done = f"{tuning.described_sizes} are not used: {problem}"
    return msgspec.structs.replace(tuning, sizes={}, not_done=not_done)


def _fallen(found: CheckResult) -> list[str]:
    return [finding.op for finding in found.findings if finding.fault is not None]


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
        verdict = find_verdict(folder, settings, spec, place, verdict_folder(settings))
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
    for problem in verdict.tuning.problems:
        logger.warning(
            "a size of programs fails on this device, another is used; please report this line: "
            "size %s (%s)",
            problem,
            verdict.described_place,
        )
    logger.info("not checked: %s", ", ".join(verdict.not_checked))
    if verdict.tuning.sizes:
        logger.info("sizes that are faster on this device: %s", verdict.tuning.described_sizes)
    if verdict.tuning.not_done:
        logger.info("sizes of programs: %s", verdict.tuning.not_done)
    return verdict


def replacement(op: str) -> str:
    """Return what is done instead of an op that fell."""
    if op == RECORDED_STEPS:
        return "steps are computed op by op, more slowly"
    return "torch computes it instead, more slowly"
