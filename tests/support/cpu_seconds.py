"""Processor time of a process: it does not depend on what else the machine does."""

import contextlib
import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Return the processor time of a process with all its threads; 0.0 if it has ended."""
    with contextlib.suppress(FileNotFoundError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0
