"""test_max_queue_size.py: `loraplex compat client test-max-queue-size`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "client", "test-max-queue-size", *sys.argv[1:]], prog_name="loraplex")
