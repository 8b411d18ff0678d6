"""A llama-server that answers with as many tokens as it is asked for; it writes what it was asked to FAKE_LLAMA_LOG."""

import json
import os
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self._answer({"status": "ok"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open(os.environ["FAKE_LLAMA_LOG"], "a", encoding="utf-8") as log:
            log.write(json.dumps(body) + "\n")
        self._answer({"tokens_predicted": body["n_predict"] - ("--short" in os.environ["FAKE_LLAMA_LOG"])})

    def log_message(self, *args):
        del args

    def _answer(self, body):
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if "broken.gguf" in sys.argv:
    sys.exit("failed to load model")
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
