"""inflight_batcher_llm_client.py: `loraplex client inflight-batcher-llm`."""

import sys

from loraplex.cli.main import app

if __name__ == "__main__":
    app(["client", "inflight-batcher-llm", *sys.argv[1:]], prog_name="loraplex")
