"""A proxy before a real Elasticsearch server, which makes faults."""

from __future__ import annotations

import collections
import contextlib
import json
import re
import socket
import threading
import time


class Proxy:
    """Stands between client and server, and makes the faults that `faults` lists.

    A fault is used up by one request: `cut` (half of the answer), `drop` (no answer), a number of
    seconds to wait first, or an answer `(status, headers, body)` of the proxy's own. While `down`
    is set every connection is refused.
    """

    def __init__(self, target: str) -> None:
        host, port = target.removeprefix("http://").split(":")
        self._target = (host, int(port))
        self.faults: collections.deque = collections.deque()
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections = 0
        self.busiest = 0
        self.down = False
        self._busy = 0
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def set_down(self, down: bool) -> None:
        with self._lock:
            self.down = down
            for connection in self._open if down else ():
                with contextlib.suppress(OSError):  # the client hung up first
                    connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.set_down(True)
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
                if self.down:
                    client.close()
                    continue
                self._open.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client.makefile("rb") as reader:
                while self._handled(client, reader):
                    pass
        except OSError:
            pass
        finally:
            # closed only where `set_down` cannot be shutting it down
            with self._lock:
                self._open.discard(client)
                client.close()

    def _handled(self, client: socket.socket, reader) -> bool:
        head, headers = self._head(reader)
        if not head:
            return False
        body = reader.read(int(headers.get("content-length", 0)))
        method, path, _ = head.split("\r\n")[0].split(" ")
        with self._lock:
            self.requests.append((method, path, headers, body))
            fault = self.faults.popleft() if self.faults else None
            self._busy += 1
            self.busiest = max(self.busiest, self._busy)
        try:
            return self._forwarded(client, head, method, body, fault)
        finally:
            with self._lock:
                self._busy -= 1

    def _forwarded(
        self, client: socket.socket, head: str, method: str, body: bytes, fault: object
    ) -> bool:
        if fault == "drop":
            return False
        if isinstance(fault, tuple):
            client.sendall(self._answer(*fault))
            return True
        if isinstance(fault, float):
            time.sleep(fault)
        with socket.create_connection(self._target) as server, server.makefile("rb") as answer:
            server.sendall(re.sub("(?i)connection: .*\r\n", "", head).encode("latin-1") + body)
            head, headers = self._head(answer)
            whole = head.encode("latin-1")
            if "chunked" in headers.get("transfer-encoding", ""):
                while size := answer.readline():
                    whole += size + answer.read(int(size, 16) + 2)
                    if int(size, 16) == 0:
                        break
            elif method != "HEAD":
                whole += answer.read(int(headers.get("content-length", 0)))
        if self.down:
            return False
        if fault == "cut":
            client.sendall(whole[: len(whole) // 2])
            return False
        client.sendall(whole)
        return True

    @staticmethod
    def _head(reader) -> tuple[str, dict[str, str]]:
        lines = []
        while line := reader.readline().decode("latin-1"):
            lines.append(line)
            if line == "\r\n":
                break
        pairs = (line.split(":", 1) for line in lines[1:-1])
        return "".join(lines), {name.lower(): value.strip() for name, value in pairs}

    @staticmethod
    def _answer(status: int, headers: dict[str, str], body: object) -> bytes:
        data = json.dumps(body).encode()
        kind = "application/vnd.elasticsearch+json;compatible-with=8"
        all_headers = {"X-Elastic-Product": "Elasticsearch", "Content-Type": kind, **headers}
        lines = [f"HTTP/1.1 {status} Status", *(f"{k}: {v}" for k, v in all_headers.items())]
        return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data
