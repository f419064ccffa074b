"""benchmark_core_model.py (old name): `loraplex compat client benchmark-core-model`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "client", "benchmark-core-model", *sys.argv[1:]], prog_name="loraplex")
