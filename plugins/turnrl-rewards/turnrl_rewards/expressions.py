"""Expressions compared by the package `math-verify`, in a process of their own with a time limit.

Ten characters, such as 9^{9^{9^9}}, can keep it busy for ever, in one long step that no signal and
no thread interrupts. So a helper process loads the package once and forks for each comparison, and
the system ends a fork that used up its time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading

from turnrl.plugin.errors import RewardError

LIMIT_S = 0.2
"""CPU time of a comparison in seconds. Common ones take a tenth of it."""
_LONGEST = 2_000
"""The most characters of an expression."""
_WAIT_S = 30.0
"""A fork on a machine so busy that it gets no CPU time in these seconds ends too."""
_COMMON = (
    *(("1/2", r"\frac{1}{2}"), ("(x+1)^2", "x^2+2x+1"), (r"\sqrt{12}", r"2\sqrt{3}")),
    *((r"\sin^2 x+\cos^2 x", "1"), (r"\{1,2\}", r"\{2,1\}"), ("(1,2)", "[1,2)"), ("x=5", "5")),
    *((r"e^{i\pi}", "-1"), (r"\binom{5}{3}", "10"), (r"\log 2", r"\ln 2"), ("3!", "6")),
    *((r"[0,1]\cup[2,3]", "x>1"), (r"\begin{pmatrix}1&2\end{pmatrix}", r"\infty")),
    *(("2\\pi i", "50\\%"), ("The answer is 5", "5 cm")),
)
"""Comparisons that load what most others need, before the first fork."""


@functools.lru_cache(maxsize=4096)
def same_expression(given: str, accepted: str) -> bool:
    """True if two texts are the same expression. Two that take longer than `LIMIT_S`, or have more
    than 2,000 characters, are not."""
    return max(len(given), len(accepted)) <= _LONGEST and _helper.same(given, accepted)


class _Helper:
    """The helper process, started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0  # a fork of this process needs a helper of its own

    def same(self, given: str, accepted: str) -> bool:
        """Ask the helper.

        Raises:
            RewardError: If it cannot be started, or ends.
        """
        with self._lock:
            for _ in range(2):
                process = self._start()
                assert process.stdin is not None
                assert process.stdout is not None
                with contextlib.suppress(OSError):
                    process.stdin.write(json.dumps([given, accepted]).encode() + b"\n")
                    process.stdin.flush()
                    if answer := process.stdout.readline():
                        return answer == b"1\n"
                self.close()  # somebody killed it; ask another one
        raise RewardError(
            "the process that compares expressions with math-verify ended twice. Try "
            f"'{sys.executable} -m turnrl_rewards.expressions </dev/null' to see why."
        )

    def _start(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._owner != os.getpid():
            command = [sys.executable, "-m", "turnrl_rewards.expressions"]
            pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
            # this folder is searched only if the run searches it, too
            search = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
            environment = {**os.environ, **search}
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=nothing, env=environment
            )
            self._owner = os.getpid()
        return self._process

    def close(self) -> None:
        """End the helper."""
        process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            with process:
                process.kill()


_helper = _Helper()
atexit.register(_helper.close)


def _serve() -> None:
    """Answer the comparisons on the standard input, one a line, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which then ends this
    for pair in _COMMON:
        _compare(*pair)
    for line in sys.stdin.buffer:
        fork = os.fork()
        if not fork:
            signal.setitimer(signal.ITIMER_VIRTUAL, LIMIT_S)
            signal.setitimer(signal.ITIMER_REAL, _WAIT_S)
            os._exit(not _compare(*json.loads(line)))
        _, status = os.waitpid(fork, 0)
        sys.stdout.write(f"{int(status == 0)}\n")
        sys.stdout.flush()


def _compare(given: str, accepted: str) -> bool:
    import math_verify  # takes a second, and few need it

    def parse(text: str) -> list[object]:
        # outside mathematics the package finds only numbers, so a bare expression gets its $ signs
        marked = re.search(r"\$|\\[(\[]|\\boxed", text)
        words = re.search(r"(?<![\\A-Za-z{])[A-Za-z]{2,}", text)
        texts = [text] if marked or words else [f"${text}$", text]
        return next((p for t in texts if (p := math_verify.parse(t, parsing_timeout=None))), [])

    with contextlib.suppress(Exception, RecursionError):  # a text may make the package stumble
        return bool(math_verify.verify(parse(accepted), parse(given), timeout_seconds=None))
    return False


if __name__ == "__main__":
    _serve()
