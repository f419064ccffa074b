"""HTTP server that streams what a scenario prescribes and records its requests.

    python fake_peer_server.py FOLDER --port N ...

FOLDER/stream.json holds the lines of a response, "{body}" in them is the request's body;
FOLDER/requests.jsonl gets a line [path, body] for each POST, FOLDER/command.json the arguments,
FOLDER/environment.json the environment.
"""

import json
import os
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
        with (FOLDER / "requests.jsonl").open("a") as log:
            log.write(json.dumps([self.path, body]) + "\n")
        with (FOLDER / "connections").open("a") as log:
            log.write(self.headers.get("connection", "keep-alive") + "\n")
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


(FOLDER / "environment.json").write_text(json.dumps(dict(os.environ)))
(FOLDER / "command.json").write_text(json.dumps(sys.argv[2:]))
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
