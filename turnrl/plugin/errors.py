"""Errors, named by who can fix them.

The policy's own mistakes (bad JSON, an unknown tool, no answer) are data and never an exception:
see `ToolResult.ok` and `Reading.format_error`. A function that is a tool raises `PolicyMistake`,
which becomes such a result. Everything else here is a mistake of the recipe, of a package, or of
the world. A message names the thing, the value and the next step. The command line prints the
message without a traceback, and exits with `exit_code`.
"""

import contextlib
import difflib
import inspect
import math
import os
import re
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from urllib.parse import urlsplit

from turnrl.plugin.text import make_visible

_UNITS = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
STDLIB, INSTALLED = str(Path(os.__file__).parent), ("site-packages", "dist-packages")


class TurnRLError(Exception):
    """Base of every error that turnrl raises on purpose. Its text passes through `make_visible`,
    because it may quote a policy, a tool or data."""

    exit_code = 2

    def __str__(self) -> str:
        return make_visible(super().__str__())


class PolicyMistake(Exception):
    """A mistake of the policy, raised by a function that is a tool: `raise PolicyMistake("no place
    of that name")`. The policy reads the text as the result of its call, which is not `ok`; the
    attempt goes on. See `find_mistake` for other exceptions of a function."""

    def __str__(self) -> str:
        return super().__str__() or "this call makes no sense"


class RecipeError(TurnRLError, ValueError):
    """The recipe, or an argument given from Python, asks for something impossible."""


class ArgumentTypeError(RecipeError, TypeError):
    """An argument given from Python has the wrong type: a class in place of an instance, or a
    string that only YAML accepts. A recipe cannot have this fault."""


class PluginError(TurnRLError, ImportError):
    """An installed plugin cannot be imported, or breaks its contract."""

    exit_code = 1


class DataError(TurnRLError, ValueError):
    """A data set or corpus is missing, empty, or lacks a field."""


class CheckpointError(TurnRLError, ValueError):
    """A checkpoint does not belong to the policy that it is loaded into."""


class WorldError(TurnRLError, RuntimeError):
    """The world that a run needs is broken: a server is down, an index is missing, a call hangs.

    It stops the run with the last good checkpoint. The policy never sees it, so no effect of an
    outage is rewarded or trained on.
    """

    exit_code = 1


class ToolError(WorldError):
    """A tool's world is broken: a search server is down, or the tool itself raises."""


class TrajectoryLost(WorldError):
    """The world lost one attempt: a sandbox crashed, a server dropped a session. Raise it from a
    tool, a session or a player. If a tool's `run` raises it, all attempts with a call in that batch
    are lost; to lose only one, return the error in place of a result. The attempt begins again with
    the same random numbers, at most `rollout.max_restarts` times; then the run stops. Probes of an
    attempt begin again with it."""


class RewardError(WorldError):
    """A reward's world is broken: a judge is down, or gives no verdict."""


class EngineError(WorldError):
    """An engine cannot sample, or samples with the wrong weights."""


class TrainingError(TurnRLError, ArithmeticError):
    """Learning has broken down: a loss or gradient that is not finite."""

    exit_code = 1


class OutputClosed(TurnRLError):
    """The program that read a run's output has ended, and so the run was stopped."""

    exit_code = 141
    """What a shell gives for a program that SIGPIPE ended."""


class DeviceMemoryError(TurnRLError, MemoryError):
    """A GPU's memory is too small for what the recipe asks for."""

    exit_code = 1


def suggest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """` Did you mean TwoTurn?` if a known name is close to `name`, else nothing."""
    spelt = {candidate.casefold(): candidate for candidate in known}
    near = [spelt[key] for key in difflib.get_close_matches(name.casefold(), spelt, 2, cutoff)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def check_at_least(
    minimum: float,
    where: str,
    owner: object,
    *names: str,
    whole: bool = False,
    optional: bool = True,
) -> None:
    """Refuse settings that are below their minimum, or not a number.

    Args:
        minimum: The least value allowed.
        where: The section of the recipe that has the settings, such as `rollout.`.
        owner: The object with the settings as attributes.
        names: The settings.
        whole: True if they must be whole numbers, as an `int` in YAML must.
        optional: True if None is allowed.
    Raises:
        RecipeError: Naming the setting and its value.
    """
    check_numbers(where, owner, *names, whole=whole, optional=optional)
    for name in names:
        value = getattr(owner, name)
        if value is not None and not value >= minimum:
            raise RecipeError(f"{where}{name} is {value}; it must be at least {minimum:g}")


def check_within(low: float, high: float, where: str, owner: object, *names: str) -> None:
    """Refuse settings that are not from `low` to `high`, or not a number.

    Raises:
        RecipeError: Naming the setting and its value.
    """
    check_numbers(where, owner, *names, optional=False)
    for name in names:
        if not low <= (value := getattr(owner, name)) <= high:
            raise RecipeError(f"{where}{name} is {value}; it must be from {low:g} to {high:g}")


def check_one_of(known: Collection[str], where: str, owner: object, *names: str) -> None:
    """Refuse settings whose value is not one of those allowed.

    Args:
        known: The values allowed.
        where: The section of the recipe that has the settings, such as `model.engine.`.
        owner: The object with the settings as attributes.
        names: The settings.
    Raises:
        RecipeError: Naming the setting, its value and the allowed ones.
    """
    for name in names:
        if (value := getattr(owner, name)) not in known:
            raise RecipeError(f"{where}{name} is {value!r}; choose one of {', '.join(known)}")


def check_attributes(subject: str, component: object, examples: Mapping[str, str]) -> None:
    """Refuse a component whose class lacks attributes that its contract only declares.

    Args:
        subject: The component's description, with which the message begins.
        component: The component.
        examples: The attributes that it must have, with an example of each.
    Raises:
        RecipeError: Naming the attribute.
    """
    for name, example in examples.items():
        if not hasattr(component, name):
            raise RecipeError(f"{subject} has no {name}. Set it in the class: {name} = {example}")


def check_numbers(
    where: str, owner: object, *names: str, whole: bool = False, optional: bool = True
) -> None:
    """Refuse settings that are not numbers. In Python, True is a number; in a recipe it is not. See
    `check_at_least` for the arguments.

    Raises:
        ArgumentTypeError: Naming the setting and its value.
    """
    for name in names:
        value = getattr(owner, name)
        fits = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        if not fits and not (optional and value is None):
            came = value if isinstance(value, Real) else describe_value(value)
            wanted = "a whole number" if whole else "a number"
            raise ArgumentTypeError(f"{where}{name} is {came}; it must be {wanted}")


def is_finite(value: object) -> bool:
    """True if a value is a number that a float can hold, numpy's scalars included: no NaN, no
    infinity, and no whole number such as 10**400, for which `math.isfinite` raises."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False


def is_bool_like(value: object) -> bool:
    """True if a value is True, False, 0 or 1, of numpy too. A text such as "False" is none of them,
    although Python counts it as true."""
    with contextlib.suppress(Exception):  # an array of several, for example
        return bool(value in (0, 1))
    return False


def check_instance(kind: type, name: str, value: object, extends: str = "") -> None:
    """Refuse an argument from Python that is not an instance of a class.

    Args:
        kind: The class.
        name: The argument, such as `estimator`, or an item of one, `rewards[0]`.
        value: Its value.
        extends: The classes that a user's class may extend, if not `kind` itself.
    Raises:
        ArgumentTypeError: Naming the argument, its value, and what to write.
    """
    if not isinstance(value, kind):
        wanted = extends or kind.__name__
        raise ArgumentTypeError(f"{name} is {describe_value(value)}. Pass an instance of {wanted}.")


def describe_value(value: object) -> str:
    """An argument's value in words: `the class TurnLevel`, `the string 'x'`, `a dict`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        return f"the string {value!r:.80}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    noun = type(value).__name__
    return "None" if value is None else f"{'an' if noun[0] in 'AEIOUaeiou' else 'a'} {noun}"


def parse_bytes(text: str, setting: str, instead: str = "") -> int:
    """The number of bytes in a size such as `4GB` or `512MiB`.

    Args:
        text: The size.
        setting: The setting that has it, for the message.
        instead: For the message, another value that the setting takes, such as "'auto', or ".
    Raises:
        RecipeError: If it is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B)\s*", str(text), re.IGNORECASE)
    if match is None or not (size := int(float(match[1]) * _UNITS[match[2].upper()])):
        raise RecipeError(
            f"{setting} is {text!r}; give {instead}a size with its unit, such as '24GB' or "
            "'512MiB' (KB to TB, KiB to TiB)"
        )
    return size


def check_address(
    name: str,
    url: object,
    example: str,
    advice: str = "Recipes are saved with every run.",
) -> None:
    """Raise if a setting is not the address of a server, or holds a secret.

    Args:
        name: The setting, for messages.
        url: Its value.
        example: An address such as the setting takes.
        advice: A sentence that says where a password or a key belongs.
    Raises:
        RecipeError: Without the address if a part of it may be a secret.
    """
    if isinstance(url, str) and re.search("[@?#]", url):
        raise RecipeError(
            f"{name} holds a user, a password or a query, which is not shown. Give only the "
            f"address, such as {example}. {advice}"
        )
    try:
        split = urlsplit(url) if isinstance(url, str) and not re.search(r"\s", url) else None
        good = split and split.scheme in ("http", "https") and split.hostname and split.port != 0
    except ValueError:
        good = False
    if not good:
        raise RecipeError(f"{name} is {url!r:.100}; it must look like {example}.")


def summarize_error(error: BaseException) -> str:
    """The class of an error and the first line of its text, without torch's advice to run code."""
    line = make_visible(str(error).strip().partition("\n")[0])
    if line.startswith("Weights only load failed"):
        line = "it holds objects beside weights, and code in them could run"
    return f"{type(error).__name__}: {line}"


_CORE = str(Path(__file__).parents[1])


def locate_error(error: BaseException) -> str:
    """` (bad.py:12)`: the innermost line of a package's own code, or else of a library, that an
    error passed through. Empty if it only passed through turnrl."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((_CORE + os.sep, "<"))]
    installed = [frame for frame in outside if {*INSTALLED} & {*Path(frame.filename).parts}]
    own = [f for f in outside if f not in installed and STDLIB not in f.filename]
    innermost = (own or installed)[-1:]
    return "".join(f" ({Path(frame.filename).name}:{frame.lineno})" for frame in innermost)


class HeldException(RuntimeError):
    """Holds an exception of a thread that a future cannot raise, such as a StopIteration, or that
    must end the run and not the event loop, such as a SystemExit.

    Args:
        cause: The exception.
    """

    def __init__(self, cause: BaseException) -> None:
        super().__init__(f"{type(cause).__name__}: {cause}")
        self.cause = cause


@contextlib.contextmanager
def blaming(kind: type[TurnRLError], what: str, advice: str) -> Iterator[None]:
    """A block in which exceptions of a package's code are reported as faults of the package.

    Args:
        kind: The error to raise.
        what: The component and its input, with which the message begins.
        advice: The next step, as a sentence.
    """
    try:
        yield
    except TurnRLError:
        raise
    except (Exception, SystemExit) as error:
        cause = error.cause if isinstance(error, HeldException) else error
        name = type(cause).__name__
        raise kind(f"{what} raised {name}: {cause}{locate_error(cause)}. {advice}") from cause
