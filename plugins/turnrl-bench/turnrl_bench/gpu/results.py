"""The results as a JSON file that is never half written, and the cases of a part."""

from __future__ import annotations

import datetime
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from turnrl import RecipeError, whole_file
from turnrl_bench.gpu import device

Found = dict[str, Any]
"""Results as JSON: figures by name, in seconds and bytes unless the name has another unit."""

DONE = "done"


class Lacking(Exception):
    """This machine lacks what a case needs."""


def now() -> str:
    """The time, for people."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def error_of(error: BaseException) -> Found:
    """An exception as JSON: its kind and text, and where it came from."""
    text = " ".join(str(error).split())[:600]
    lines = traceback.format_exception(error)
    return {
        "status": "error",
        "error": f"{type(error).__name__}: {text}",
        "where": "".join(lines)[-3000:].splitlines(),
    }


class Results:
    """The file: the shape that is measured, and by its name each part with a status and its cases.

    A part is `running`, `done`, `partial` (some of its cases failed or were skipped), `error` or
    `skipped`. Every change is written to a file beside it, which then takes its place.

    Args:
        file: Where.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.about: Found = {}
        self.parts: dict[str, Found] = {}
        if file.is_file():
            self.read()

    def read(self) -> None:
        """Read what another process has written.

        Raises:
            RecipeError: If the file is not one of these.
        """
        try:
            kept = json.loads(self.file.read_text("utf-8"))
            self.about, self.parts = dict(kept["about"]), dict(kept["parts"])
        except (ValueError, KeyError, TypeError) as error:
            raise RecipeError(
                f"{str(self.file)!r} is not a file of 'turnrl bench gpu'. Give another --json."
            ) from error

    def describe(self, tiny: bool) -> None:
        """Note the shape that is measured.

        Raises:
            RecipeError: If there are results of the other one.
        """
        if self.about.setdefault("tiny", tiny) != tiny:
            size = "the whole shape" if tiny else "the tiny shape"
            raise RecipeError(f"{str(self.file)!r} has results of {size}. Give another --json.")
        self._save()

    def part(self, name: str) -> Found:
        """A part, empty if there is none."""
        return self.parts.get(name, {})

    def case(self, part: str, name: str) -> Found:
        """A case that was measured, empty if it was not."""
        case: Found = self.part(part).get("cases", {}).get(name, {})
        return case if case.get("status") == DONE else {}

    def note(self, name: str, **values: object) -> None:
        """Change some entries of a part, and write the file."""
        self.parts.setdefault(name, {"cases": {}}).update(values)
        self._save()

    def end(self, name: str) -> None:
        """Give a part that has run to its end the status that its cases make."""
        cases = self.part(name).get("cases", {}).values()
        whole = all(case["status"] == DONE for case in cases)
        self.note(name, status=DONE if whole else "partial", ended=now())

    def _save(self) -> None:
        kept = {"about": self.about, "parts": self.parts}
        with whole_file(self.file) as new:
            new.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


class Cases:
    """The cases of one part: each is recorded as soon as it ends, and none ends the others.

    Args:
        results: Where they are recorded.
        part: The part's name.
        until: `time.monotonic()` after which no case begins.
    """

    def __init__(self, results: Results, part: str, until: float) -> None:
        self.results, self.part, self.until = results, part, until

    def run(self, name: str, work: Callable[[], Found], least_s: float = 0.0) -> None:
        """Measure one case, unless an earlier run has done so.

        Args:
            name: The case's name.
            work: Measures it.
            least_s: With fewer seconds left it is skipped.
        """
        if self.results.case(self.part, name):
            return
        began = time.monotonic()
        left = self.until - began
        if left < least_s or left <= 0:
            why = f"needs about {least_s:.0f} s, and {max(left, 0):.0f} s are left"
            entry: Found = {"status": "skipped", "why": why}
        else:
            try:
                entry = {"status": DONE, **work(), "seconds": time.monotonic() - began}
            except Lacking as error:
                entry = {"status": "skipped", "why": str(error)}
            except Exception as error:
                entry = error_of(error)
        self.results.note(self.part, cases={**self.results.part(self.part)["cases"], name: entry})
        device.free()  # here, where the exception and what its frames held are gone
