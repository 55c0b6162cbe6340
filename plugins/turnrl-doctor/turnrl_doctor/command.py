"""`turnrl doctor [RECIPE ...] [--card 24GB] [--key value ...]`: the command line."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from turnrl import Check, Finding, RecipeError
from turnrl.plugin.errors import PluginError, TurnRLError, parse_bytes
from turnrl.plugin.hooks import installed
from turnrl.plugin.text import Style, fitted, painted, say, terminal_columns, visible
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
    text = "plan the memory of a card of this size, such as 24GB"
    options.add_argument("--card", metavar="SIZE", help=text)
    args, words = options.parse_known_args(parsed.recipe)
    card = args.card
    if card is not None:
        parse_bytes(card, "--card")
    import torch  # here, because listing commands does not need it

    start, mistakes, seen = None, list[Finding](), Counter[Status]()
    with _quiet():
        if words:
            start, mistakes = _built(words, card)
            seen = _shown(mistakes)
        elif card is not None:
            raise RecipeError("--card plans a recipe's memory, and there is none. Name a recipe.")
        if start is None:
            start = Start(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        code = 2 if seen["fail"] else 0
        findings = diagnose(start, mistakes)
        seen += _shown(map(for_another_machine, findings) if card else findings)
    say(_in_sum(seen, "A run on that card" if card else "A run"))
    return code or int(seen["fail"] > 0)


def for_another_machine(finding: Finding) -> Finding:
    """Judge a finding of this machine for a card in another one: what this machine lacks is a
    warning there, not a failure."""
    lacks = finding.about == "machine" and finding.status == "fail"
    return replace(finding, status="warn") if lacks else finding


def _built(words: list[str], card: str | None) -> tuple[Start | None, list[Finding]]:
    """Build the recipe as far as it can be built, and list its mistakes."""
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from turnrl import build

    words = [*words, *([f"--model.gpu_memory={card}"] if card else [])]
    try:
        return build(words).start, []
    except TurnRLError as error:
        if not isinstance(error.__cause__, MisconfigurationException):
            return None, [of_error("recipe", error)]
        mistakes = [of_error("trainer", error)]  # a missing accelerator, for example
    except Exception as error:  # any other error of Lightning's
        mistakes = [of_error("trainer", error, "Fix the recipe's trainer section.")]
    options = ("accelerator=cpu", "devices=1", "strategy=auto")
    try:  # examine the rest all the same
        return build([*words, *(f"--trainer.{option}" for option in options)]).start, mistakes
    except Exception:
        return None, mistakes


def diagnose(start: Start, known: Iterable[Finding] = ()) -> Iterator[Finding]:
    """Run all installed checks. If one raises, the error is a finding too, and the others still
    run.

    Args:
        start: The run to examine.
        known: Failures that were printed already.
    """
    shown = {finding.text for finding in known}

    def once(finding: Finding) -> Finding:
        """Pass a failure on only once if several checks meet it, such as a missing configuration of
        the model."""
        if finding.status != "fail" or finding.text not in shown:
            shown.add(finding.text)
            return finding
        return Finding("warn", finding.name, "not examined, for a reason above")

    checks: list[Check] = []
    try:
        classes = installed("turnrl_checks")
    except TurnRLError as error:
        yield once(of_error("plugins", error))
        return
    for name, cls in classes.items():
        try:
            check = cls()
            check.settle(start)
        except (Exception, SystemExit) as error:  # a check may be anybody's code
            yield once(_raised(name, error))
        else:
            checks.append(check)
    for check in checks:
        name = type(check).__name__
        try:
            for finding in check.run(start):
                if not isinstance(finding, Finding) or finding.status not in get_args(Status):
                    raise PluginError(
                        f"{name}.run gave {finding!r}, which is not a Finding. Fix it."
                    )
                yield once(finding)
        except (Exception, SystemExit) as error:
            yield once(_raised(name, error))


def of_error(
    name: str, error: BaseException, step: str = "", about: Literal["machine", "recipe"] = "recipe"
) -> Finding:
    """A failure as a line: the error's first sentence is the text, the rest is the next step.

    Args:
        name: The line's name.
        error: The error.
        step: The next step if the error names none.
        about: As in `Finding`.
    """
    message = " ".join(str(error).split())
    if not isinstance(error, TurnRLError):
        message = f"{type(error).__name__}: {message}"
    text, _, own_step = message.partition(". ")
    return Finding("fail", name, text.rstrip("."), own_step or step, about)


def _raised(name: str, error: BaseException) -> Finding:
    unknown = f"The check {name} could not finish; a run may show more."
    return of_error(_spaced(name), error, "" if isinstance(error, TurnRLError) else unknown)


def _spaced(name: str) -> str:
    """`MemoryPlan` as `memory plan`."""
    return "".join(f" {c.lower()}" if c.isupper() else c for c in name).strip()


def _shown(findings: Iterable[Finding]) -> Counter[Status]:
    """Print findings as they come, and count them."""
    seen = Counter[Status]()
    for finding in findings:
        seen[finding.status] += 1
        first, *more_lines = lines_of(finding, _columns())
        status = painted(finding.status, _STYLES[finding.status])
        print("\n".join([status + first.removeprefix(finding.status), *more_lines]), flush=True)
    return seen


def _in_sum(seen: Mapping[Status, int], run: str) -> str:
    """A line with the consequence of the findings for a run."""
    if seen["fail"]:
        count = seen["fail"]
        failures = "the failure" if count == 1 else f"the {count} failures"
        return f"{run} would stop. Fix {failures}, then run the doctor again."
    return f"{run} can begin" + (f"; see the warnings ({seen['warn']})." if seen["warn"] else ".")


def _columns() -> int | None:
    """The width of a line on a terminal; None elsewhere, because scripts read a line at a time."""
    columns = terminal_columns(sys.stdout)
    return None if columns is None else min(80, columns)


def lines_of(finding: Finding, columns: int | None) -> list[str]:
    """A finding as lines: status, name, text; and the next step below.

    Args:
        finding: The finding.
        columns: The most columns of a line; None for no limit.
    """
    indent = " " * (6 + _NAME + 2)
    begin = f"{finding.status}  {finding.name:{_NAME}}  "
    text, advice = (" ".join(visible(part).split()) for part in (finding.text, finding.advice))
    lines = [fitted(begin + text, columns, indent)]
    lines += [fitted(indent + advice, columns, "")] if advice else []
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
