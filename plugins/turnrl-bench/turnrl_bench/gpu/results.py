"""The results as a JSON file, which is never half written, and the cases of a part."""

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
    """An exception as JSON: its class and text, and its traceback."""
    text = " ".join(str(error).split())[:600]
    lines = traceback.format_exception(error)
    return {
        "status": "error",
        "error": f"{type(error).__name__}: {text}",
        "where": "".join(lines)[-3000:].splitlines(),
    }


class Results:
    """The file: the shape that is measured, and each part by name, with its status and its cases.

    A part is `running`, `done`, `partial` (some of its cases failed or were skipped), `error` or
    `skipped`. Every change is written to a second file, which then replaces the first.

    Args:
        file: Path of the file.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.about: Found = {}
        self.parts: dict[str, Found] = {}
        if file.is_file():
            self.read()

    def read(self) -> None:
        """Read the results that another process has written.

        Raises:
            RecipeError: If the file is not a file of results.
        """
        try:
            data = json.loads(self.file.read_text("utf-8"))
            self.about, self.parts = dict(data["about"]), dict(data["parts"])
        except (ValueError, KeyError, TypeError) as error:
            raise RecipeError(
                f"{str(self.file)!r} is not a file of 'turnrl bench gpu'. Give another --json."
            ) from error

    def describe(self, tiny: bool) -> None:
        """Note the shape that is measured.

        Raises:
            RecipeError: If the file has results of the other shape.
        """
        if self.about.setdefault("tiny", tiny) != tiny:
            size = "the whole shape" if tiny else "the tiny shape"
            raise RecipeError(f"{str(self.file)!r} has results of {size}. Give another --json.")
        self._save()

    def part(self, name: str) -> Found:
        """A part, empty if there is none."""
        return self.parts.get(name, {})

    def case(self, part: str, name: str) -> Found:
        """The results of a case, empty unless it was measured."""
        case: Found = self.part(part).get("cases", {}).get(name, {})
        return case if case.get("status") == DONE else {}

    def note(self, name: str, **values: object) -> None:
        """Change some entries of a part, and write the file."""
        self.parts.setdefault(name, {"cases": {}}).update(values)
        self._save()

    def end(self, name: str) -> None:
        """Set the status of a part that has run to its end, from the status of its cases."""
        cases = self.part(name).get("cases", {}).values()
        complete = all(case["status"] == DONE for case in cases)
        self.note(name, status=DONE if complete else "partial", ended=now())

    def _save(self) -> None:
        data = {"about": self.about, "parts": self.parts}
        with whole_file(self.file) as new:
            new.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


class Cases:
    """The cases of one part. Each is recorded as soon as it ends, and a failure does not end the
    others.

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
            work: Measures the case.
            least_s: With fewer seconds left, the case is skipped.
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
        device.free()  # only here, because an exception's frames hold tensors until then
