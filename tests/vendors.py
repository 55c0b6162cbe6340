"""A server of chat completions that says what a test wants to hear."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Vendor(ThreadingHTTPServer):
    """Sends what a function of the messages and of the request's number returns: a text, or a
    status to fail with."""

    daemon_threads = True

    def __init__(self, says):
        super().__init__(("127.0.0.1", 0), Handler)
        self.says, self.bodies, self.keys = says, [], []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        self.server.keys.append(self.headers.get("authorization"))
        reply = self.server.says(body["messages"], len(self.server.bodies))
        if isinstance(reply, int):
            error = json.dumps({"error": {"message": f"no: {self.server.keys[-1]}"}}).encode()
            self.send_response(reply)
            self.send_header("content-length", str(len(error)))
            self.end_headers()
            self.wfile.write(error)
            return
        most = body["max_tokens"] * 3  # a token is three characters here
        message = {"role": "assistant", "content": reply[:most]}
        why = "length" if len(reply) > most else "stop"
        self.complete({"message": message, "finish_reason": why})

    def complete(self, choice):
        self.send(json.dumps({"choices": [choice]}).encode())

    def send(self, data, kind="application/json"):
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def vendor(says):
    """Such a server, as long as it is needed."""
    server = Vendor(says)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
