"""benchmark_core_model.py under its name before 2024: `loraplex client benchmark-core-model`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["client", "benchmark-core-model", *sys.argv[1:]], prog_name="loraplex")
