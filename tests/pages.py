"""What a reader can copy from a page of the documentation, and a terminal to type it in."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from nursery import Nursery

ROOT = Path(__file__).parent.parent
SHELLS = ("bash", "sh", "console")


@dataclass(frozen=True)
class Piece:
    """One thing that a page shows.

    `kind` is the language of a fenced block ("text" if it names none, or is indented instead);
    "command" for a command, of which a block of the shell may have several; "mention" for a command
    in the middle of a sentence; "option" for an option there.
    """

    page: str
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}: {self.text.strip().splitlines()[0][:70]}"


def example(page: str, name: str) -> str:
    """The block of Python that a page marks with `<!-- NAME example -->`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"<!-- {name} example -->\n```python\n(.*?)```", text, re.DOTALL)
    return block


def pieces(page: str) -> list[Piece]:
    """Everything on a page that can be copied, in the order of the page."""
    shown: list[Piece] = []
    for language, text in _parts((ROOT / page).read_text(encoding="utf-8")):
        if language in SHELLS:
            shown += [Piece(page, "command", command) for command in _commands(text)]
        elif language is not None and language.startswith("{"):
            continue  # an order to Sphinx: the test of the site is its test
        elif language is not None:
            shown.append(Piece(page, language or "text", text))
        else:
            for span in re.findall(r"`([^`]+)`", text):
                words = " ".join(span.split())
                if re.match(r"(turnrl|python3?|pip|docker|pytest|\.venv\S+) ", words):
                    shown.append(Piece(page, "mention", words))
                elif words.startswith("--"):
                    shown.append(Piece(page, "option", words))
    return shown


def _parts(text: str) -> Iterator[tuple[str | None, str]]:
    """Blocks with their language, and with None what is between them."""
    for number, part in enumerate(
        re.split(r"^(```.*?^```)$", text, flags=re.MULTILINE | re.DOTALL)
    ):
        if number % 2:
            language, _, block = part.removeprefix("```").partition("\n")
            yield language.strip(), block.removesuffix("```")
            continue
        # lines set off by four spaces after an empty one are a block too
        for at, piece in enumerate(re.split(r"(?<=\n\n)((?: {4}.*\n)+)", part)):
            yield ("", textwrap.dedent(piece)) if at % 2 else (None, piece)


def _commands(block: str) -> list[str]:
    """Its commands, those that go over several lines as they stand."""
    joined = re.findall(r"(?:.*\\\n)*.+\n?", block)
    return [line.strip("\n") for line in joined if line.strip() and not line.startswith("#")]


@dataclass(frozen=True)
class Done:
    """How a command ended, and what the terminal shows of it."""

    code: int
    shown: str

    @property
    def plain(self) -> str:
        """Without colours and moves."""
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.shown.replace("\r\n", "\n"))

    @property
    def lines(self) -> list[str]:
        """What is read in the end: without what was drawn over."""
        return [line.split("\r")[-1].rstrip() for line in self.plain.split("\n")]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Terminal:
    """A folder in which commands are typed: each in a bash of its own, in a terminal of 80 columns;
    what is exported holds for those that follow.

    Args:
        nursery: What starts `turnrl` in a moment; None if it is to start as it does for a user.
    """

    def __init__(self, folder: Path, nursery: Nursery | None, **environment: str) -> None:
        self.folder = folder
        unwanted = ("COLUMNS", "LINES", "JSONARGPARSE_DEPRECATION_WARNINGS")
        kept = {k: v for k, v in os.environ.items() if k not in unwanted}
        path = f"{Path(sys.executable).parent}{os.pathsep}{kept['PATH']}"
        if nursery is not None:
            path = f"{nursery.bin}{os.pathsep}{path}"
            kept |= nursery.environment
        hub = {"HF_HOME": str(folder / ".cache"), "HF_HUB_OFFLINE": "1"}
        self.environment = {**kept, "PATH": path, "TERM": "xterm-256color", **hub, **environment}
        self._exports: list[str] = []

    def type(self, command: str, ctrl_c_at: str = "", timeout_s: float = 300) -> Done:
        """Run a command.

        Args:
            ctrl_c_at: The text on the screen at which Ctrl-C is pressed.
        """
        screen, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        line = "\n".join([*self._exports, command])
        # a session of its own: Ctrl-C goes to all of its processes, as that of a terminal does
        with subprocess.Popen(
            ["bash", "-c", line],
            cwd=self.folder,
            env=self.environment,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            start_new_session=True,
        ) as process:
            os.close(inside)
            late = threading.Timer(timeout_s, os.killpg, (process.pid, signal.SIGKILL))
            late.start()
            shown, pressed = b"", not ctrl_c_at
            with contextlib.suppress(OSError):  # the terminal is gone when the last process is
                while piece := os.read(screen, 65536):
                    shown += piece
                    if not pressed and ctrl_c_at.encode() in shown:
                        os.killpg(process.pid, signal.SIGINT)
                        pressed = True
            process.wait()
            late.cancel()
        os.close(screen)
        if command.startswith("export "):
            self._exports.append(command)
        return Done(process.returncode, shown.decode(errors="replace"))


def snippet_of(piece: Piece, claims: Sequence[str]) -> str | None:
    """The claim that is about a piece: the longest whose text is in it."""
    return max((claim for claim in claims if claim in piece.text), key=len, default=None)
