"""Errors, by whose mistake they are; how a program is stopped; and helpers that every module
shares.

The policy's own mistakes (bad JSON, an unknown tool, no answer) are data and never an exception:
see `ToolResult.ok` and `Reading.format_error`. Everything here is a mistake of the recipe, of a
package, or of the world. A message names the thing, the value and the next step; the command line
prints the message alone, without a traceback, and exits with `exit_code`.
"""

import contextlib
import difflib
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any


class TurnRLError(Exception):
    """Base of every error that turnrl raises on purpose."""

    exit_code = 2


class RecipeError(TurnRLError, ValueError):
    """The recipe, or an argument given from Python, asks for something that cannot be."""


class PluginError(TurnRLError, ImportError):
    """An installed plugin cannot be imported, or breaks its contract."""


class DataError(TurnRLError, ValueError):
    """A data set or corpus is missing, empty, or lacks a field."""


class CheckpointError(TurnRLError, ValueError):
    """A checkpoint does not belong to the policy that it is loaded into."""


class WorldError(TurnRLError, RuntimeError):
    """The world that a run needs is broken: a server is down, an index is missing, a call hangs.

    It stops the run with the last good checkpoint. It is never shown to the policy, so nothing that
    an outage produced is rewarded or trained on.
    """

    exit_code = 1


class ToolError(WorldError):
    """A tool's world is broken: a search server is down, or the tool itself raises."""


class RewardError(WorldError):
    """A reward's world is broken: a judge is down, or gives no verdict."""


class EngineError(WorldError):
    """An engine cannot sample, or samples with other weights than it was given."""


class TrainingError(TurnRLError, ArithmeticError):
    """Learning has broken down: a loss or gradient that is not finite."""

    exit_code = 1


class DeviceMemoryError(TurnRLError, MemoryError):
    """A GPU's memory is too small for what the recipe asks for."""

    exit_code = 1


_AGAIN_S = 1.0
"""After how long a signal that nobody heard is raised once more."""


@contextlib.contextmanager
def stopping() -> Iterator[list[int]]:
    """Within it SIGTERM stops a program as Ctrl-C does, by a `KeyboardInterrupt`.

    What is raised in a finaliser, say, is lost: so it is raised again, until a moment comes when it
    is being dealt with.

    Yields:
        The signals that came.
    """
    came: list[int] = []
    before: dict[int, Any] = {}

    def take(number: int) -> None:
        before[number] = signal.signal(number, stop)

    def stop(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGALRM and isinstance(sys.exception(), KeyboardInterrupt):
            return
        if not came:
            take(signal.SIGALRM)
        came.append(number)
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S if frame is None else 0.05)
        if frame is None:
            raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        take(signal.SIGTERM)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            take(signal.SIGINT)
    try:
        yield came
    finally:
        if came:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean TwoTurn?` if something known is close to `name`, else nothing."""
    spelt = {one.casefold(): one for one in known}
    near = [spelt[one] for one in difflib.get_close_matches(name.casefold(), spelt, 2, cutoff)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def at_least(minimum: float, where: str, owner: object, *names: str) -> None:
    """Refuse settings that are below their minimum, or not a number; None passes.

    Args:
        minimum: The least value allowed.
        where: What the settings belong to in a recipe, such as `rollout.`.
        owner: Whose attributes they are.
        names: The settings.
    Raises:
        RecipeError: Naming the setting and its value.
    """
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= minimum:
            raise RecipeError(f"{where}{name} is {value}; it must be at least {minimum:g}")


def out_of_memory(error: BaseException) -> bool:
    """True for an error of memory that ran out, on a device or beside it."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if kinds & {"OutOfMemoryError", "MemoryError"}:
        return True
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


_REFUSALS = {98, 209, 701, 801, *range(900, 910)}
"""CUDA errors that say no and leave the device as it was: no such kernel for this card, too little
room for a launch, not supported, not while a graph is captured
(https://docs.nvidia.com/cuda/cuda-runtime-api, cudaError)."""

_DEVICE_WORDS = (
    *("out of memory", "alloc_failed", "defaultcpuallocator", "cuda error"),
    *("same device", "two devices", "expected device", "cpu tensor?"),
)
"""In the words of torch's operations, of its checks of fake tensors, and of Triton's launcher."""


def of_the_device(error: BaseException) -> bool:
    """True for an error of memory, of a GPU, or of tensors on two devices.

    It says nothing about the thing that was tried, so a check that tries something must raise it:
    two devices are a mistake of turnrl's, and memory that is short now is short later.
    """
    if out_of_memory(error):
        return True
    if "AcceleratorError" in {kind.__name__ for kind in type(error).__mro__}:
        return getattr(error, "error_code", None) not in _REFUSALS
    text = str(error).lower()
    return isinstance(error, RuntimeError | ValueError) and any(w in text for w in _DEVICE_WORDS)


def in_short(error: BaseException) -> str:
    """The kind of an error and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


@contextlib.contextmanager
def blaming(kind: type[TurnRLError], what: str, advice: str) -> Iterator[None]:
    """The boundary to a package's code: what it raises is reported as a fault of the package.

    Args:
        kind: The error to raise.
        what: Who raised, on what.
        advice: The next step, as a sentence.
    """
    try:
        yield
    except TurnRLError:
        raise
    except (Exception, SystemExit) as error:
        raise kind(f"{what} raised {type(error).__name__}: {error}. {advice}") from error
