"""A progress bar on standard error, in runs of a benchmark."""

from types import TracebackType
from typing import Self

from tqdm import tqdm


class RunBar:
    """What the benchmark commands' bars share; each says in its own way what is done."""

    def __init__(self) -> None:
        # disable=None: only where a person watches.
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
