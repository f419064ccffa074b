"""A progress bar on standard error, in runs of a benchmark."""

from types import TracebackType
from typing import Self

from tqdm import tqdm


class RunBar:
    """Base of the benchmark commands' bars; each describes its progress in its own way."""

    def __init__(self) -> None:
        # disable=None: only on a terminal.
        self._bar = tqdm(desc="starting", unit="run", leave=False, disable=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
