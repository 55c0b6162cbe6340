"""Exceptions of a tool's code: mistakes of the policy, and faults of the world."""

from __future__ import annotations

import functools
import json
import re
import sys
import traceback
from pathlib import PurePath

from turnrl.plugin.errors import INSTALLED, STDLIB, PolicyMistake, TurnRLError

_PROVOKED = (ValueError, LookupError, ArithmeticError, AssertionError)
_RECEIVED = (OSError, UnicodeError, json.JSONDecodeError)
"""Exceptions that come from files and servers, whatever the policy does."""
_OF_THREADS = re.compile(r"main thread|(?:same|different|another) thread|event loop in thread")


def find_mistake(error: BaseException, code: object) -> PolicyMistake | None:
    """The policy's mistake behind an exception of a tool; None if it is the world that is broken.

    A value that a policy made up leads to a ValueError, a KeyError or a division by zero, and an
    author raises an exception of his own class, or a plain one, for a move that is not allowed.
    Everything else, such as a lost connection, bad JSON of a server or a misspelt attribute, would
    happen whatever the policy does.

    Args:
        error: The exception.
        code: The function or class of the tool.
    """
    if isinstance(error, PolicyMistake):
        return error
    fault = isinstance(error, (TurnRLError, *_RECEIVED)) or is_thread_error(error)
    if not isinstance(error, Exception) or fault:
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_at = frames[-1].f_globals.get("__name__", "") if frames else ""
    plain = type(error) in (Exception, RuntimeError) and _is_own(raised_at, code)
    if plain or isinstance(error, _PROVOKED) or _is_own(type(error).__module__, code):
        return PolicyMistake(f"{type(error).__name__}: {error}")
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
    return file is not None and not (
        file.startswith(STDLIB) or {*INSTALLED} & {*PurePath(file).parts}
    )


def is_thread_error(error: BaseException | None) -> bool:
    """True if code raised because of the thread that called it: it sets a signal handler, or holds
    something that only one thread may use, such as a `sqlite3` connection."""
    return isinstance(error, Exception) and _OF_THREADS.search(str(error)) is not None
