"""Load of an adapter whose name, rights and source are checked: done, or tried out in detail."""

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from loraplex.adapters.staged import Examination
from loraplex.adapters.staging import StagedAdapter
from loraplex.adapters.store import Registration
from loraplex.core.errors import (
    AdapterMismatchError,
    AdapterTooLargeError,
    InvalidAdapterError,
    LoraplexError,
    UnsupportedFeatureError,
)
from loraplex.core.principal import Principal
from loraplex.core.request import RequestId
from loraplex.serving.adapter_cards import LoadReport, TrialRefusal, TrialReport
from loraplex.serving.adapters.canary import NoEffectError
from loraplex.serving.adapters.loading import CatalogLoader
from loraplex.serving.served_model import ServedModel

_REFUSALS: Final = (
    *(InvalidAdapterError, AdapterMismatchError, AdapterTooLargeError),
    UnsupportedFeatureError,
)
"""Errors about an adapter itself. Others are about its source or the server."""


@dataclasses.dataclass(frozen=True, slots=True)
class BegunLoad:
    loader: CatalogLoader
    new_request_id: Callable[[], RequestId]
    model: ServedModel
    principal: Principal
    name: str
    path: str
    task_id: int | None = dataclasses.field(kw_only=True)
    replace: bool = dataclasses.field(kw_only=True)
    register: Callable[[StagedAdapter], Awaitable[Registration]] | None = dataclasses.field(
        kw_only=True
    )
    upload: Path | None = dataclasses.field(kw_only=True)

    async def load(self, *, dry_run: bool, canary: bool) -> LoadReport:
        return await self.loader.load(
            self.model,
            self.principal,
            name=self.name,
            path=self.path,
            task_id=self.task_id,
            replace=self.replace,
            dry_run=dry_run,
            canary_id=self.new_request_id if canary else None,
            register=self.register,
            upload=self.upload,
        )

    async def try_out(self, *, canary: bool) -> TrialReport:
        """Return what a load would do. Raises errors that are not about the adapter."""
        report: LoadReport | None = None
        error: LoraplexError | None = None
        try:
            report = await self.load(dry_run=True, canary=canary)
        except _REFUSALS as refusal:
            error = refusal
        try:
            tenant = self.principal.tenant
            examined = await self.loader.examine(self.model, self.path, tenant, self.upload)
        except _REFUSALS:  # no tensor can be listed, and the load was refused for the same reason
            examined = Examination()
        engine = self.model.engine
        free = engine.capacity.num_adapter_pages - engine.stats.adapters.device_pages_used
        return TrialReport(
            is_ok=error is None,
            refusal=None if error is None else TrialRefusal(error.code, error.message),
            examination=examined,
            changes_base=_changes_base(report, error),
            fits_now=None if report is None else report.content.device_pages <= free,
            free_pages=free,
            adapter=report,
        )


def _changes_base(report: LoadReport | None, error: LoraplexError | None) -> bool | None:
    if isinstance(error, NoEffectError):
        return False
    return None if report is None or report.canary is None else True
