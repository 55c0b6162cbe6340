"""Exceptions of a tool's code: mistakes of the policy, and faults of threads."""

from __future__ import annotations

import dis
import errno
import functools
import json
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from types import CodeType

from turnrl.plugin.errors import INSTALLED, STDLIB, PolicyMistake, TurnRLError

_PROVOKED: tuple[type[Exception], ...] = (
    *(ValueError, LookupError, ArithmeticError, AssertionError, RecursionError),
    *(re.error, SyntaxError),  # of an expression that the policy wrote
    subprocess.SubprocessError,  # of a program that it wrote
)
_RECEIVED = (OSError, UnicodeError, json.JSONDecodeError)
_RAISED = (Exception, RuntimeError, TimeoutError)
_OF_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)
_STATED = (TypeError, NotImplementedError, EOFError, StopIteration, PermissionError, *_OF_PATHS)
"""Exceptions that mean a move is not allowed only if an author's own `raise` raises them."""
_OF_SQL = {"ProgrammingError", "DataError", "IntegrityError", "NotSupportedError"}
"""Names of exceptions for SQL that a database cannot run, in every driver of Python (PEP 249)."""
_OF_SQLITE = re.compile("SQLITE_(?:ERROR|READONLY|INTERRUPT|TOOBIG|MISMATCH|AUTH|RANGE)")
_OF_THREADS = re.compile(
    # of signal and tkinter; of sqlite3; of greenlet; of asyncio; of threading.local
    r"main thread|same thread|(?:an)?other thread|different thread|event loop in thread"
    r"|_thread\._local"
)


def mistake_of(
    error: BaseException, code: object, arguments: object = None
) -> PolicyMistake | None:
    """The policy's mistake behind an exception of a tool; None if it is the world that is broken.

    A value that a policy made up leads to a ValueError, a KeyError, a division by zero; a path, a
    JSON text, a query or a program that it wrote fails as such; and an author raises an exception
    of his own, or a plain one, for a move that is not allowed. Everything else, such as a lost
    connection, bad JSON of a server or a misspelt attribute, would happen whatever the policy does.

    Args:
        error: The exception.
        code: The function or class of the tool.
        arguments: The arguments of the call.
    """
    if isinstance(error, PolicyMistake):
        return error
    if not isinstance(error, Exception | SystemExit) or isinstance(error, TurnRLError):
        return None
    kind, frames = type(error), [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    raised_at = frames[-1].f_globals.get("__name__", "") if frames else ""
    wanted = _RAISED if not _is_stated(error) else (*_RAISED, *_STATED)
    raised = kind in wanted and _is_own(raised_at, code)
    provoked = isinstance(error, _PROVOKED) or _is_own(kind.__module__, code)
    if (
        raised
        or (provoked and not isinstance(error, _RECEIVED))
        or _is_of_sql(error)
        or _is_of_sql(error.__cause__)  # as pandas and SQLAlchemy raise it
        or _is_about(error, arguments)
        or any(_is_written(frame.f_code, code) for frame in frames)
    ):
        return PolicyMistake(f"{kind.__name__}: {error}")
    return None


def _is_stated(error: BaseException) -> bool:
    """True if a `raise` raised the exception, and not an operation that failed."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    raises = dis.opmap["RAISE_VARARGS"]
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == raises


def _is_of_sql(error: BaseException | None) -> bool:
    """True if a database cannot run a query, for example because of its syntax. `sqlite3` calls
    this operational, and gives it a name; it refuses two statements in one text by a warning."""
    names = {cls.__name__ for cls in type(error).__mro__}
    of_sqlite = type(error).__module__ == "sqlite3" and "Warning" in names
    known = names & _OF_SQL and not re.search(r"\bclosed\b", str(error))
    sqlite = _OF_SQLITE.fullmatch(getattr(error, "sqlite_errorname", None) or "")
    return bool(known or of_sqlite or sqlite)


def _is_about(error: BaseException, arguments: object) -> bool:
    """True if the exception names what the policy wrote: a path, or a text that is no JSON or
    cannot be encoded."""
    texts = [text for text in _texts(arguments) if text.strip()]
    if isinstance(error, json.JSONDecodeError | UnicodeError):
        about = getattr(error, "doc", None) or getattr(error, "object", None)
        known = about.strip() if isinstance(about, str) else ""
        return bool(known) and any(known in text for text in texts)
    too_long = isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG
    if not too_long and not isinstance(error, (*_OF_PATHS, PermissionError)):
        return False
    file = PurePath(str(getattr(error, "filename", "")))
    return any(PurePath(text).name in (file.name, file.stem) for text in texts)


def _texts(value: object) -> Iterator[str]:
    """The texts in the arguments of a call."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(part)


def _is_written(code: CodeType, tool: object) -> bool:
    """True of code that was compiled from a text, as `eval` and `exec` do, and not by a library
    that writes methods. It is the policy's, unless the tool itself was made so."""
    own = getattr(getattr(tool, "__code__", None), "co_filename", None)
    return code.co_filename == "<string>" != own and not code.co_name.startswith("__")


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


def is_of_threads(error: BaseException | None) -> bool:
    """True if code raised because of the thread that called it: it sets a signal handler, or holds
    something that only one thread may use, such as a `sqlite3` connection. Threads of another kind,
    as in "no such thread in this forum", are the tool's own business."""
    return isinstance(error, Exception) and _OF_THREADS.search(str(error)) is not None
