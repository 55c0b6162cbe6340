"""`turnrl doctor [RECIPE ...] [--card 24GB] [--key value ...]`: the command line."""

from __future__ import annotations

import argparse
import contextlib
import logging
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

from turnrl import (
    Check,
    Finding,
    PluginError,
    RecipeError,
    Start,
    Status,
    TurnRLError,
    installed,
    parse_bytes,
)

USAGE = """\
usage: turnrl doctor [RECIPE ...] [--card SIZE] [--key value ...]

Examine this machine and, with a recipe, everything of it that can fail later.
No weights are loaded. Each line is pass, warn or fail, with the next step below
it. The exit code is 1 if a line says fail, and 2 if the recipe is wrong.

  RECIPE         as of 'turnrl fit'; without one the machine alone is examined
  --card SIZE    plan the memory of a card of this size, such as 24GB
  --key value    settings of the recipe, as of 'turnrl fit'
"""
_NAME = 13
_HERE = ("versions", "GPU", "4", "run", "disk", "model", "data", "tool")
"""Beginnings of lines that are about this machine, and what it has or reaches."""


def add_doctor_command(commands: Any) -> None:
    """Add `doctor` to argparse's sub-parsers."""
    # no word is an option to argparse: they are the recipe's, which knows hundreds
    parser = commands.add_parser(
        "doctor", help="examine a recipe and this machine", prefix_chars="\0", add_help=False
    )
    parser.add_argument("recipe", nargs="*")  # and options
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    words, card = _split(parsed.recipe)
    if {"-h", "--help"} & {*words}:
        print(USAGE, end="")
        return 0
    code, start = 0, None
    with _quiet():
        if words:
            start, mistakes = _built(words, card)
            code = _shown(mistakes, 2)
        elif card is not None:
            raise RecipeError("--card plans a recipe's memory, and there is none. Name a recipe.")
        if start is None:
            start = Start(_device())
        found = diagnose(start)
        return max(code, _shown(map(_of_another_machine, found) if card else found, 1))


def _of_another_machine(found: Finding) -> Finding:
    """A finding where a card is planned for that is elsewhere: what this machine lacks is no
    failure of the plan."""
    here = found.name.split()[0] in _HERE
    return replace(found, status="warn") if here and found.status == "fail" else found


def _split(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Split the words of a command line into the recipe's and the card."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--card", nargs="?", const="")
    given, rest = parser.parse_known_args(words)
    if given.card == "":
        raise RecipeError("--card has no value. Give a size, such as --card 24GB.")
    if given.card is not None:
        parse_bytes(given.card, "--card")
    return rest, given.card


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _built(words: list[str], card: str | None) -> tuple[Start | None, list[Finding]]:
    """Build the recipe as far as it can be built, and list its mistakes."""
    from turnrl import build
    from turnrl_doctor.checks import of_error

    words = [*words, *([f"--model.profile={card}"] if card else [])]
    try:
        return build(words).start, []
    except TurnRLError as error:
        return None, [of_error("recipe", error)]
    except Exception as error:  # Lightning's own, of an accelerator that is not there, say
        found = of_error("trainer", error)
        step = found.step or "Mend the recipe's trainer section."
        mistakes = [Finding("fail", "trainer", found.text, step)]
    options = ("accelerator=cpu", "devices=1", "strategy=auto")
    try:  # the rest can be examined all the same
        return build([*words, *(f"--trainer.{one}" for one in options)]).start, mistakes
    except Exception:
        return None, mistakes


def diagnose(start: Start) -> Iterator[Finding]:
    """Run all installed checks. One that raises is a line itself, and hides no other.

    Args:
        start: What is examined.
    """
    from turnrl_doctor.checks import of_error

    told: set[str] = set()

    def once(found: Finding) -> Finding:
        """A failure that others share (the model's configuration is missing, say) is told once."""
        if found.status != "fail" or found.text not in told:
            told.add(found.text)
            return found
        return Finding("warn", found.name, "not examined, for a reason above")

    checks: list[Check] = []
    try:
        classes = installed("turnrl_checks")
    except TurnRLError as error:
        yield of_error("plugins", error)
        return
    for name, cls in classes.items():
        try:
            check = cls()
            check.settle(start)
        except (Exception, SystemExit) as error:  # anybody's code
            yield once(_raised(name, error))
        else:
            checks.append(check)
    for check in checks:
        name = type(check).__name__
        try:
            for found in check.run(start):
                if not isinstance(found, Finding) or found.status not in get_args(Status):
                    raise PluginError(f"{name}.run gave {found!r}, which is no Finding. Mend it.")
                yield found
        except (Exception, SystemExit) as error:  # the same
            yield once(_raised(name, error))


def _raised(name: str, error: BaseException) -> Finding:
    from turnrl_doctor.checks import of_error

    found = of_error(_spaced(name), error)
    if isinstance(error, TurnRLError):
        return found
    step = f"The check {name} could not finish; a run may show more."
    return Finding("fail", found.name, found.text, found.step or step)


def _spaced(name: str) -> str:
    """`memory plan` of `MemoryPlan`."""
    return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


def _shown(findings: Any, code: int) -> int:
    """Print findings as they come; the code if one of them is a failure, else 0."""
    failed = False
    for found in findings:
        failed = failed or found.status == "fail"
        print("\n".join(lines_of(found, _columns())), flush=True)
    return code if failed else 0


def _columns() -> int | None:
    """The width to keep to on a terminal, None elsewhere: scripts read a line at a time."""
    return min(80, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None


def lines_of(found: Finding, columns: int | None) -> list[str]:
    """A finding as lines: status, name, text; and the next step below.

    Args:
        found: The finding.
        columns: The most of a line; None for any number.
    """
    indent = " " * (6 + _NAME + 2)
    begin = f"{found.status}  {found.name:{_NAME}}  "
    lines = []
    for head, text in ((begin, found.text), (indent, found.step)):
        if not text:
            continue
        if columns is None:
            lines.append(head + text)
        else:
            lines += textwrap.wrap(
                text, max(columns, 40), initial_indent=head, subsequent_indent=indent
            )
    return lines


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what libraries say of themselves: Lightning's lines on accelerators, and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
