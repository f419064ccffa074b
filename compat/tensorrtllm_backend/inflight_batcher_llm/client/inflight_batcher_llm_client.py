"""inflight_batcher_llm_client.py: `loraplex compat client inflight-batcher-llm`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["compat", "client", "inflight-batcher-llm", *sys.argv[1:]], prog_name="loraplex")
