"""Real Elasticsearch servers of our own, each with one node."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
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

    def signal(self, number: int) -> None:
        os.kill(int(Path(self.home, "pid").read_text()), number)

    def crash(self, away_s: float = 0.0) -> None:
        """Kill it, and start it again; it answers when this returns, some seconds later."""
        self.signal(signal.SIGKILL)
        time.sleep(away_s)
        subprocess.run([STARTER, "resume", "--home", self.home], capture_output=True, check=True)


def free_port() -> int:
    """A port at which nothing listens."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port < 65_000:  # the node's transport port is 100 above
            return port
