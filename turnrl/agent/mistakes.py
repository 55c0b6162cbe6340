"""Exceptions of a tool's code: the policy's mistakes, and faults that come of threads."""

from __future__ import annotations

import functools
import json
import re
import sys
import traceback
from pathlib import Path

from turnrl.errors import INSTALLED, STDLIB, PolicyMistake, TurnRLError

_PROVOKED: tuple[type[Exception], ...] = (
    *(ValueError, LookupError, ArithmeticError, AssertionError, RecursionError),
    *(re.error, SyntaxError),  # of an expression that the policy wrote
)
_RECEIVED = (OSError, UnicodeError, json.JSONDecodeError)
_RAISED = (Exception, RuntimeError, TimeoutError)
_OF_THREADS = re.compile(
    # of signal and tkinter; of sqlite3; of greenlet; of asyncio; of threading.local
    r"main thread|same thread|(?:an)?other thread|different thread|event loop in thread"
    r"|_thread\._local"
)


def mistake_of(error: BaseException, code: object) -> PolicyMistake | None:
    """The policy's mistake behind an exception of a tool; None if it is the world that is broken.

    A value that a policy made up leads to a ValueError, a KeyError, a division by zero; and an
    author raises an exception of his own, or a plain one, for a move that is not allowed.
    Everything else, such as a lost connection, bad JSON of a server or a misspelt attribute, would
    happen whatever the policy does.

    Args:
        error: The exception.
        code: The function or class of the tool.
    """
    if isinstance(error, PolicyMistake):
        return error
    if not isinstance(error, Exception) or isinstance(error, TurnRLError):
        return None
    kind, frames = type(error), [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_at = frames[-1].f_globals.get("__name__", "") if frames else ""
    raised = kind in _RAISED and _is_own(raised_at, code)
    provoked = isinstance(error, _PROVOKED) or _is_own(kind.__module__, code)
    if raised or (provoked and not isinstance(error, _RECEIVED)):
        return PolicyMistake(f"{kind.__name__}: {error}")
    return None


def _is_own(module: str, code: object) -> bool:
    """True if a module belongs to a tool's author: it is of the same package as the tool's code, or
    lies outside the standard library and installed packages."""
    while isinstance(code, functools.partial):
        code = code.func
    home = getattr(code, "__module__", None) or ""
    if module != "builtins" and module.partition(".")[0] == home.partition(".")[0]:
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not (file.startswith(STDLIB) or {*INSTALLED} & {*Path(file).parts})


def is_of_threads(error: BaseException) -> bool:
    """True if code raised because of the thread that called it: it sets a signal handler, or holds
    something that only one thread may use, such as a `sqlite3` connection. Threads of another kind,
    as in "no such thread in this forum", are the tool's own business."""
    return isinstance(error, Exception) and _OF_THREADS.search(str(error)) is not None
