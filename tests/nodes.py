"""A real Elasticsearch server of our own, with one node, and a proxy that makes faults."""

from __future__ import annotations

import base64
import collections
import contextlib
import json
import re
import shutil
import socket
import ssl
import subprocess
import tempfile
import threading
import time
from pathlib import Path

import pytest

STARTER = Path(__file__).parents[2] / "shared" / "elasticsearch" / "server"
PASSWORD = "correct-horse-battery"
LOCKED = ("--password", PASSWORD, "--tls", "--heap", "384m")
"""What makes a server that asks for a password, and has a certificate."""


class Node:
    """A server that starts in the background, and ends with the process that it is for.

    Args:
        folder: What is known of it. If the folder is there, its server is used.
        owner: The process.
        options: Of the starter.
    """

    def __init__(self, folder: Path, owner: int, *options: str) -> None:
        if not STARTER.is_file() or shutil.which("java") is None:
            pytest.skip(f"needs {STARTER} and Java 17 to start an Elasticsearch server")
        self._folder = folder
        if not folder.exists():
            folder.mkdir()
            # not in the folder: a server that root starts is run by nobody, who may not look there
            home = tempfile.mkdtemp(prefix="turnrl-es-")
            (folder / "home").symlink_to(home)
            start = [STARTER, "start", "--home", home, "--port", str(free_port()), *options]
            script = f"""(
                "$@" >url 2>error; echo $? >code.new; mv code.new code
                while kill -0 {owner}; do sleep 1; done
                kill -9 $(cat home/pid); rm -rf {home}
            ) </dev/null >/dev/null 2>&1 &"""
            command = ["sh", "-c", script, "sh", *map(str, start)]
            subprocess.run(command, cwd=folder, start_new_session=True, check=True)
        self.home = str((folder / "home").resolve())
        self.certificate = str(Path(self.home, "http.crt"))

    @property
    def url(self) -> str:
        """Its address, once it answers."""
        code, late = self._folder / "code", time.monotonic() + 180
        while not code.exists():
            assert time.monotonic() < late, "the starter neither started the server nor gave up"
            time.sleep(0.1)
        assert code.read_text() == "0\n", (self._folder / "error").read_text()
        return (self._folder / "url").read_text().strip()


class Proxy:
    """Stands between a client and a server, and makes the faults that `faults` lists. In front of a
    locked node it is the node's administrator, so its own clients need no password.

    A fault is used up by one request: `cut` (half of the answer), `drop` (no answer), a number of
    seconds to wait first, or an answer `(status, headers, body)` of the proxy's own. While `down`
    is set every connection is refused.
    """

    def __init__(self, target: str, node: Node | None = None) -> None:
        self._node = node
        host, port = target.partition("://")[2].split(":")
        self._target = (host, int(port))
        self.faults: collections.deque = collections.deque()
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections = 0
        self.busiest = 0
        self.hangs = False
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
        while self.hangs:
            time.sleep(0.05)
        head = re.sub("(?i)connection: .*\r\n", "", head)
        with self._connected() as server, server.makefile("rb") as answer:
            if self._node is not None:
                own = base64.b64encode(f"elastic:{PASSWORD}".encode()).decode()
                head = re.sub("(?i)authorization: .*\r\n", "", head)
                head = f"{head[:-2]}Authorization: Basic {own}\r\n\r\n"
            server.sendall(head.encode("latin-1") + body)
            head, headers = self._head(answer)
            whole = head.encode("latin-1")
            if method == "HEAD":
                pass  # it may say how its body would come, and has none
            elif "chunked" in headers.get("transfer-encoding", ""):
                while size := answer.readline():
                    whole += size + answer.read(int(size, 16) + 2)
                    if int(size, 16) == 0:
                        break
            else:
                whole += answer.read(int(headers.get("content-length", 0)))
        if self.down:
            return False
        if fault == "cut":
            client.sendall(whole[: len(whole) // 2])
            return False
        client.sendall(whole)
        return True

    def _connected(self) -> socket.socket:
        server = socket.create_connection(self._target)
        if self._node is None:
            return server
        trusted = ssl.create_default_context(cafile=self._node.certificate)
        return trusted.wrap_socket(server, server_hostname=self._target[0])

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


def free_port() -> int:
    """A port at which nothing listens."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port < 65_000:  # the node's transport port is 100 above
            return port
