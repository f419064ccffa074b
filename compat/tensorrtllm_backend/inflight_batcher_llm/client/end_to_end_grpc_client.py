"""end_to_end_grpc_client.py: `loraplex compat client end-to-end-grpc`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "client", "end-to-end-grpc", *sys.argv[1:]], prog_name="loraplex")
