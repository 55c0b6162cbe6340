"""A server that speaks vLLM's protocol and takes a given time for each step, whatever the machine:
`python paced_server.py PORT STEP_S ROW_S READ_S ROWS`. Its tokens mean nothing."""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Steps:
    """All turns, a step at a time: what is new is read, and then each turn gets a token."""

    def __init__(self, step_s: float, row_s: float, read_s: float, rows: int) -> None:
        self._times, self._rows = (step_s, row_s, read_s), rows
        self._came = threading.Condition()
        self._waiting: list[list] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def turn(self, read: int, sampled: int) -> None:
        """Take part in the steps until it has its tokens."""
        done = threading.Event()
        with self._came:
            self._waiting.append([read, sampled, done])
            self._came.notify()
        done.wait()

    def _serve(self) -> None:
        step_s, row_s, read_s = self._times
        active: list[list] = []
        due = time.monotonic()
        while True:
            with self._came:
                if not active and not self._waiting:
                    self._came.wait_for(lambda: self._waiting)
                    due = time.monotonic()
                while self._waiting and len(active) < self._rows:
                    active.append(self._waiting.pop(0))
            due += step_s + row_s * len(active) + read_s * sum(row[0] for row in active)
            time.sleep(max(0, due - time.monotonic()))  # a step that was late is made up for
            for row in active:
                row[0], row[1] = 0, row[1] - 1
                if not row[1]:
                    row[2].set()
            active = [row for row in active if row[1]]


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    steps: Steps
    seen: set[tuple[int, ...]] = set()

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(
            {
                "/health": None,
                "/version": {"version": "paced"},
                "/v1/models": {"data": [{"id": "base", "max_model_len": 100_000}]},
            }.get(self.path)
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/completions":
            refused = "there-is-no-such-folder" in json.dumps(body)
            reply = {"error": "No adapter found for turnrl-trial"} if refused else {"tokens": None}
            self._answer(reply, 404 if refused or self.path == "/tokenize" else 200)
            return
        several = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        count = body["max_tokens"]
        if len(several) == 1:  # not the engine's own trial
            self.steps.turn(self._new(tuple(several[0])), count)
        choice = {
            "token_ids": [7] * count,
            "logprobs": {"token_logprobs": [-1.0] * count},
            "finish_reason": "length",
        }
        self._answer({"choices": [{"index": n} | choice for n in range(len(several))]})

    def _new(self, ids: tuple[int, ...]) -> int:
        """Tokens that no turn before this one has read."""
        known = next((n for n in range(len(ids), 0, -1) if ids[:n] in self.seen), 0)
        self.seen.update(ids[:n] for n in range(1, len(ids) + 1))
        return len(ids) - known

    def _answer(self, reply: object, status: int = 200) -> None:
        data = b"" if reply is None else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    port, *rates, rows = sys.argv[1:]
    Handler.steps = Steps(*map(float, rates), int(rows))
    server = ThreadingHTTPServer(("127.0.0.1", int(port)), Handler)
    server.request_queue_size = 256
    server.serve_forever()
