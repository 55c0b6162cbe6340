"""A process that has imported what every command needs, and forks a command whenever one is asked
for: on two cores the imports take longer than most commands do.

Run as a script this file is `turnrl`, or with `--python` Python: it hands its arguments, folder,
environment and terminal to the nursery, passes signals on, and ends as the command ended. What is
decided while modules are imported (`HF_HOME`, say) is the nursery's own; a test that is about this
starts Python itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

WHERE = "TURNRL_TEST_NURSERY"
_PYTHON = sys.executable
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def command(*arguments: str) -> list[str]:
    """What to start in place of `python -m turnrl`."""
    return [_PYTHON, "-I", "-S", __file__, *arguments]


def python(*arguments: str) -> list[str]:
    """What to start in place of `python`."""
    return command("--python", *arguments)


class Nursery:
    """The process, in a folder of its own.

    Args:
        folder: Made if it is not there. If it is, its nursery is used.
        owner: The process with which it ends.
    """

    def __init__(self, folder: Path, owner: int) -> None:
        address = folder / "socket"
        self.bin = folder / "bin"
        """A folder for `PATH`, in which `turnrl` and `python` are."""
        self.environment = {WHERE: str(address)}
        """What a command needs to find it."""
        if address.exists():
            return
        self.bin.mkdir(parents=True)
        for name, words in (("turnrl", command()), ("python", python())):
            shell = self.bin / name
            shell.write_text(f'#!/bin/sh\nexec {" ".join(words)} "$@"\n')
            shell.chmod(0o755)
        subprocess.run(
            [_PYTHON, "-c", f"import nursery; nursery.serve({owner})"],
            cwd=folder,
            env={
                **os.environ,
                **self.environment,
                "PYTHONPATH": _path(),
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(folder / "hub"),
            },
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            check=True,
        )

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let this process start its `sys.executable` here, with the tests' modules at hand."""
        monkeypatch.setattr("sys.executable", str(self.bin / "python"))
        for name, value in {**self.environment, "PYTHONPATH": _path()}.items():
            monkeypatch.setenv(name, value)


def _path() -> str:
    """Where Python looks for modules: the tests, and what the environment names."""
    return os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]))


# --------------------------------------------------------------------------------- the nursery


def serve(owner: int) -> None:
    """Fork a command for each that connects, as long as a process is there."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(os.environ[WHERE])
    server.listen(64)
    if os.fork():  # whoever started it goes on: it can be asked, though it has imported nothing yet
        os._exit(0)
    import turnrl.recipe.build  # noqa: F401
    from turnrl.plugin.hooks import load_plugins

    load_plugins()
    _prepare()
    gc.collect()
    gc.freeze()  # a command need not look through what is here
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while Path(f"/proc/{owner}").exists():
        if not select.select([server], [], [], 1.0)[0]:
            continue
        asked, _ = server.accept()
        if os.fork() == 0:
            server.close()
            _keep(asked)
        asked.close()


_SOON = (
    *("matplotlib.backends.backend_svg", "matplotlib.font_manager", "pandas", "s3fs", "tantivy"),
    *("transformers.generation.utils", "transformers.models.audioflamingo3"),
    *("transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen2.tokenization_qwen2"),
    *("turnrl.watch.curves", "turnrl_doctor.rehearsal", "turnrl_slots.engine"),
)
"""What a run, an evaluation or a report imports once it has begun."""


def _prepare() -> None:
    """Do once what every command would do anew, and what depends on nothing that it is given."""
    for name in _SOON:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from turnrl_atlas import Atlas

    for split in ("train", "val"):
        Atlas().questions(split)
    with contextlib.suppress(ImportError, AttributeError):  # of some versions of transformers
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping

        get_checkpoint_conversion_mapping("qwen2")  # hundreds of patterns


def _keep(asked: socket.socket) -> None:
    """Start the command, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, _, _ = socket.recv_fds(asked, 1 << 20, 3)
    while not text.endswith(b"\n"):
        if not (more := asked.recv(1 << 20)):  # who asked was killed outright
            os._exit(0)
        text += more
    request = json.loads(text)
    pid = os.fork()
    if pid:
        for stream in streams:
            os.close(stream)
        asked.sendall(f"{pid}\n".encode())
        while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
            if select.select([asked], [], [], 0.05)[0]:  # who asked was killed outright
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            asked.sendall(f"{os.waitstatus_to_exitcode(ended[1])}\n".encode())
        os._exit(0)
    asked.close()
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[1:1] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - it stays open
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # for the other processes of a run
    sys.executable = str(Path(os.environ[WHERE]).parent / "bin" / "python")
    from turnrl.cli import main
    from turnrl.plugin.hooks import load_plugins

    load_plugins.cache_clear()  # this command's environment may choose others
    program, *rest = request["arguments"] or [""]
    if program != "--python" or rest[:2] == ["-m", "turnrl"]:
        words = rest[2:] if program == "--python" else request["arguments"]
        sys.argv = [str(Path(_PYTHON).parent / "turnrl"), *words]
        sys.exit(main())
    if rest[:1] == ["-m"]:
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        sys.exit()
    if not rest or rest[0].startswith("-"):
        os.execv(_PYTHON, [_PYTHON, *rest])
    sys.argv = rest
    sys.path[0] = str(Path(rest[0]).resolve().parent)
    runpy.run_path(rest[0], run_name="__main__")
    sys.exit()


# --------------------------------------------------------------------------------- in its place


def _ask() -> None:
    with socket.socket(socket.AF_UNIX) as nursery:
        nursery.connect(os.environ[WHERE])
        request = {
            "arguments": sys.argv[1:],
            "folder": str(Path.cwd()),
            "environment": dict(os.environ),
        }
        text = json.dumps(request).encode() + b"\n"
        sent = socket.send_fds(nursery, [text], [0, 1, 2])
        nursery.sendall(text[sent:])
        answers = nursery.makefile()
        pid = int(answers.readline())
        for number in _SIGNALS:
            signal.signal(number, lambda number, _: os.kill(pid, number))
        code = int(answers.readline())
    if code < 0:
        with contextlib.suppress(OSError):  # nobody hears SIGKILL
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    _ask()
