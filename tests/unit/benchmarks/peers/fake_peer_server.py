"""An HTTP server that streams what a scenario says and keeps what it was asked.

    python fake_peer_server.py FOLDER --port N ...

FOLDER/stream.json holds the lines of an answer, "{body}" in them is what was asked;
FOLDER/asked.jsonl gets a line [path, body] for each POST, and FOLDER/command.json the arguments.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FOLDER = Path(sys.argv[1])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with (FOLDER / "asked.jsonl").open("a") as log:
            log.write(json.dumps([self.path, body]) + "\n")
        with (FOLDER / "connections").open("a") as log:
            log.write(self.headers["connection"] + "\n")
        if body.get("prompt") == [99]:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b"no such token")
            return
        self.send_response(200)
        self.end_headers()
        for line in json.loads((FOLDER / "stream.json").read_text()):
            self.wfile.write(line.encode() + b"\n\n")

    def log_message(self, *args):
        pass


(FOLDER / "command.json").write_text(json.dumps(sys.argv[2:]))
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
