"""Facts that the tool finds and the questions ask about: countries.csv, a row for each country."""

import csv
import functools
from collections.abc import Mapping
from importlib.resources import files

FACTS = ("capital", "continent")


@functools.cache
def countries() -> Mapping[str, Mapping[str, str]]:
    """The rows by the country's name, in the order of the file."""
    text = files(__package__).joinpath("countries.csv").read_text(encoding="utf-8")
    return {row["country"]: row for row in csv.DictReader(text.splitlines())}
