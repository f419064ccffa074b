"""Print how much of each package of src/loraplex the tests ran: `coverage_by_package.py DATA`."""

import collections
import sys
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parents[1] / "src" / "loraplex"


def lines_by_package(data: str) -> dict[str, list[int]]:
    """Return for each package, and for "all", how many statements it has and how many ran."""
    coverage = Coverage(data_file=data)
    coverage.load()
    counts = collections.defaultdict(lambda: [0, 0])
    for path in sorted(ROOT.rglob("*.py")):
        _, statements, _, missing, _ = coverage.analysis2(str(path))
        parts = path.relative_to(ROOT).parts
        for package in (".".join(parts[:-1][:2]) or "(top)", "all"):
            counts[package][0] += len(statements)
            counts[package][1] += len(statements) - len(missing)
    return counts


if __name__ == "__main__":
    print(f"{'package':32} {'statements':>10} {'ran':>10}")
    by_package = lines_by_package(sys.argv[1])
    for package in sorted(by_package, key=lambda name: (name == "all", name)):
        num_statements, num_ran = by_package[package]
        print(f"{package:32} {num_statements:10} {num_ran / max(num_statements, 1):10.1%}")
