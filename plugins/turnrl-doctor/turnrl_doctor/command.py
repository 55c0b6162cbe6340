"""`turnrl doctor [RECIPE ...] [--card 24GB] [--key value ...]`: the command line."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from turnrl import Check, Finding, RecipeError
from turnrl.plugin.errors import TurnRLError, parse_bytes
from turnrl.plugin.hooks import load_classes
from turnrl.plugin.text import Style, make_visible, paint, say, terminal_columns, wrap_text
from turnrl.types import Start, Status

_USAGE = "turnrl doctor [RECIPE ...] [--card SIZE] [--key value ...]"
_ABOUT = """\
Examine this machine, and everything that can fail later in a RECIPE. The doctor tries a few
questions: it calls the tools, scores attempts, and lets a miniature of the model learn a step. It
does not load the model's own weights, and writes nothing. Each line is pass, warn or fail, with
the next step below it. The exit code is 1 if a line says fail, and 2 if the recipe is wrong.
Recipes and settings work as in 'turnrl fit'."""
_NAME = 13
_STYLES: Mapping[Status, Style] = {"pass": "good", "warn": "alarm", "fail": "bad"}


def add_doctor_command(commands: Any) -> None:
    """Add `doctor` to argparse's sub-parsers."""
    # argparse must parse no option here: they belong to the recipe, which knows hundreds
    parser = commands.add_parser(
        "doctor", help="examine a recipe and this machine", prefix_chars="\0", add_help=False
    )
    parser.add_argument("recipe", nargs="*")  # and options
    parser.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    # no abbreviations, which might be meant for the recipe
    options = argparse.ArgumentParser(usage=_USAGE, description=_ABOUT, allow_abbrev=False)
    text = "print the memory plan for a card of this size, such as 24GB, and check nothing else"
    options.add_argument("--card", metavar="SIZE", help=text)
    args, words = options.parse_known_args(parsed.recipe)
    if args.card is not None:
        parse_bytes(args.card, "--card")
        if not words:
            raise RecipeError("--card plans a recipe's memory, and there is none. Name a recipe.")
    with _quiet():
        return _plan(words, args.card) if args.card else _examine(words)


def _plan(words: list[str], card: str) -> int:
    """Print the memory plan of a recipe for a card that may be in another machine."""
    from turnrl_doctor.memory import MemoryPlan  # here, because it loads torch

    start, mistakes = _build_recipe([*words, f"--model.gpu_memory={card}"])
    if start is None:
        _show(mistakes)
        return 2
    check = MemoryPlan()
    check.settle(start)
    return int(_show(check.run(start))["fail"] > 0)


def _examine(words: list[str]) -> int:
    """Print what all checks find in a recipe, or in this machine alone."""
    import torch  # here, because listing commands does not need it

    start, mistakes = _build_recipe(words) if words else (None, [])
    if start is None:
        start = Start(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    seen = _show(itertools.chain(mistakes, diagnose(start)))
    if seen["fail"]:
        say("A run would stop. Fix what failed, then run the doctor again.")
    else:
        warned = f"; see the warnings ({seen['warn']})" if seen["warn"] else ""
        say(f"A run can begin{warned}.")
    return 2 if mistakes else int(seen["fail"] > 0)


def _build_recipe(words: list[str]) -> tuple[Start | None, list[Finding]]:
    """Build the recipe as far as it can be built, and list its mistakes."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from turnrl import build

    try:
        return build(words).start, []
    except TurnRLError as error:
        if not isinstance(error.__cause__, MisconfigurationException):
            return None, [error_finding("recipe", error)]
        mistakes = [error_finding("trainer", error)]  # a missing accelerator, for example
    except Exception as error:  # any other error of Lightning's
        mistakes = [error_finding("trainer", error, "Fix the recipe's trainer section.")]
    options = ("accelerator=cpu", "devices=1", "strategy=auto")
    try:  # examine the rest all the same
        return build([*words, *(f"--trainer.{option}" for option in options)]).start, mistakes
    except Exception:
        return None, mistakes


def diagnose(start: Start) -> Iterator[Finding]:
    """Run all installed checks. If one raises, the error is a finding too, and the others still
    run.

    Args:
        start: The run to examine.
    """
    checks: list[Check] = []
    try:
        kinds = load_classes("turnrl_checks")
    except TurnRLError as error:
        yield error_finding("plugins", error)
        return
    for name, kind in kinds.items():
        try:
            check = kind()
            check.settle(start)
        except (Exception, SystemExit) as error:  # a check may be anybody's code
            yield _error_of_check(name, error)
        else:
            checks.append(check)
    for check in checks:
        try:
            yield from check.run(start)
        except (Exception, SystemExit) as error:
            yield _error_of_check(type(check).__name__, error)


def error_finding(name: str, error: BaseException, step: str = "") -> Finding:
    """A failure as a line: the error's first sentence is the text, the rest is the next step.

    Args:
        name: The line's name.
        error: The error.
        step: The next step if the error names none.
    """
    message = " ".join(str(error).split())
    if not isinstance(error, TurnRLError):
        message = f"{type(error).__name__}: {message}"
    text, _, own_step = message.partition(". ")
    return Finding("fail", name, text.rstrip("."), own_step or step)


def _error_of_check(name: str, error: BaseException) -> Finding:
    spaced = re.sub("(?<!^)([A-Z])", r" \1", name).lower()  # `MemoryPlan` as `memory plan`
    return error_finding(spaced, error, f"The check {name} could not finish; a run may show more.")


def _show(findings: Iterable[Finding]) -> Counter[Status]:
    """Print findings as they come, and count them. If several checks meet the same failure, such as
    a missing configuration of the model, it is printed once."""
    seen, failures = Counter[Status](), set[str]()
    columns = terminal_columns(sys.stdout)  # None for a script, which reads a line at a time
    for finding in findings:
        if finding.status == "fail":
            if finding.text in failures:
                continue
            failures.add(finding.text)
        seen[finding.status] += 1
        first, *more_lines = format_finding(finding, columns and min(80, columns))
        status = paint(finding.status, _STYLES[finding.status])
        print("\n".join([status + first.removeprefix(finding.status), *more_lines]), flush=True)
    return seen


def format_finding(finding: Finding, columns: int | None) -> list[str]:
    """A finding as lines: status, name, text; and the next step below.

    Args:
        finding: The finding.
        columns: The most columns of a line; None for no limit.
    """
    indent = " " * (6 + _NAME + 2)
    begin = f"{finding.status}  {finding.name:{_NAME}}  "
    text, advice = (" ".join(make_visible(part).split()) for part in (finding.text, finding.advice))
    lines = [wrap_text(begin + text, columns, indent)]
    lines += [wrap_text(indent + advice, columns, "")] if advice else []
    return "\n".join(lines).split("\n")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence libraries: Lightning's lines about accelerators, and warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
