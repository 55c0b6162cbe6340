"""Functions as tools, rewards and question sources."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import math
import re
import threading
from collections.abc import Callable
from typing import Annotated, Any, Literal

import pydantic
import pytest
from jsonschema import Draft202012Validator

from turnrl import PolicyMistake, RecipeError, described


class Unit(enum.Enum):
    METRIC = "km"
    IMPERIAL = "miles"


@dataclasses.dataclass
class Place:
    name: str
    latitude: float = 0.0


class Trip(pydantic.BaseModel):
    title: str
    stops: list[Place] = []


class Tree(pydantic.BaseModel):
    branches: list[Tree] = []


def distance(
    start: Place,
    trip: Trip,
    day: datetime.date,
    unit: Unit = Unit.METRIC,
    mode: Literal["road", "air"] = "road",
    via: list[str] | None = None,
    most: Annotated[int, pydantic.Field(ge=1)] = 3,
) -> str:
    """Measure how far
    a trip is.

    It is slow.

    Args:
        start: Where the trip
            begins.
        most: The most stops.
    """
    return f"{start} {trip} {day} {unit} {mode} {via} {most}"


PLACE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "latitude": {"type": "number", "default": 0.0}},
    "required": ["name"],
}


def test_a_functions_schema_is_whole_in_each_place_and_without_titles_but_the_users_own():
    spec = described(distance).spec
    assert (spec.name, spec.description) == (
        "distance",
        "Measure how far a trip is.\n\nIt is slow.",
    )
    assert spec.parameters == {
        "type": "object",
        "properties": {
            "start": {**PLACE, "description": "Where the trip begins."},
            "trip": {
                "type": "object",
                "properties": {
                    "title": {"type": "string"},
                    "stops": {"type": "array", "items": PLACE, "default": []},
                },
                "required": ["title"],
            },
            "day": {"type": "string", "format": "date"},
            "unit": {"type": "string", "enum": ["km", "miles"], "default": "km"},
            "mode": {"type": "string", "enum": ["road", "air"], "default": "road"},
            "via": {
                "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                "default": None,
            },
            "most": {
                "type": "integer",
                "description": "The most stops.",
                "default": 3,
                "minimum": 1,
            },
        },
        "required": ["start", "trip", "day"],
        "additionalProperties": False,
    }
    assert list(spec.parameters) == ["type", "properties", "required", "additionalProperties"]
    Draft202012Validator.check_schema(spec.parameters)


def test_a_type_that_contains_itself_stays_a_definition():
    def prune(tree: Tree) -> str:
        """Cut a tree."""
        return str(tree)

    found = described(prune)
    assert found.spec.parameters["properties"] == {"tree": {"$ref": "#/$defs/Tree"}}
    schema = Draft202012Validator(found.spec.parameters)
    assert schema.is_valid({"tree": {"branches": [{"branches": []}]}})
    assert not schema.is_valid({"tree": {"branches": [3]}})
    assert found.bind({"tree": {"branches": [{}]}}) == {"tree": Tree(branches=[Tree()])}


def test_arguments_arrive_as_objects_with_the_defaults_of_the_function():
    bound = described(distance).bind(
        {
            "start": {"name": "Utrecht"},
            "trip": {"title": "North", "stops": [{"name": "Assen", "latitude": 53}]},
            "day": "2026-02-28",
            "most": 2.0,  # which JSON Schema takes for a whole number
        }
    )
    assert bound == {
        "start": Place("Utrecht"),
        "trip": Trip(title="North", stops=[Place("Assen", 53.0)]),
        "day": datetime.date(2026, 2, 28),
        "unit": Unit.METRIC,
        "mode": "road",
        "via": None,
        "most": 2,
    }
    assert isinstance(bound["most"], int)


def test_what_the_schema_cannot_say_is_the_policys_mistake():
    with pytest.raises(PolicyMistake, match=r"^bad arguments: day: .*valid date"):
        described(distance).bind(
            {"start": {"name": "A"}, "trip": {"title": "B"}, "day": "2026-02-31"}
        )


def google(query: str, top_k: int = 3) -> str:
    """Search pages.

    Args:
        query: Words of
            the question.
        top_k (int): How many.

    Returns:
        The pages.
    """
    return query * top_k


def numpy_style(query: str, top_k: int = 3) -> str:
    """Search pages.

    Parameters
    ----------
    query : str
        Words of
        the question.
    top_k : int, optional
        How many.

    Returns
    -------
    str
        The pages.
    """
    return query * top_k


def sphinx(query: str, top_k: int = 3) -> str:
    """Search pages.

    :param query: Words of
        the question.
    :param int top_k: How many.
    :return: The pages.
    """
    return query * top_k


@pytest.mark.parametrize("function", [google, numpy_style, sphinx])
def test_docstrings_of_three_styles_say_the_same(function):
    spec = described(function, name="search").spec
    assert (spec.name, spec.description) == ("search", "Search pages.")
    assert spec.parameters["properties"] == {
        "query": {"type": "string", "description": "Words of the question."},
        "top_k": {"type": "integer", "description": "How many.", "default": 3},
    }


class Shelf:
    def find(self, title: str) -> str:
        """Find a book."""
        return title


@pytest.mark.parametrize(
    "given",
    [
        described(Shelf().find),
        described(Shelf.find, skip=("self",)),
        described(functools.partial(google, top_k=1), name="find", skip=()),
        described(functools.partial(sphinx, "words"), name="find"),
    ],
)
def test_methods_and_partial_functions_leave_out_what_is_given_already(given):
    assert given.spec.name == "find"
    assert len(given.spec.parameters["properties"]) == 1


def refused(source: str) -> str:
    """What the message says about a function in source code."""
    space: dict[str, Any] = {"Callable": Callable, "threading": threading, "math": math}
    exec(compile(source, "f.py", "exec", dont_inherit=True), space)
    with pytest.raises(RecipeError) as error:
        described(space["f"])
    return re.sub(r"<class '|'>", "", str(error.value))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(x, y=3): 'Doc.'", r"Write 'def f\(x: str, y: int = 3\)'"),
        ("def f(x: str): pass", 'f has no docstring that says what it does.*"""What it does'),
        ("def f(*x: str): 'Doc.'", r"f takes '\*x'.*Name each parameter"),
        ("def f(**x: str): 'Doc.'", r"f takes '\*\*x'.*Name each parameter"),
        ("def f(x: str, /): 'Doc.'", "'x' of the function f .* Take the '/' out"),
        ("def f(x: threading.Event): 'Doc.'", "'x' of the function f is of the type Event, .*enum"),
        ("def f(x: Callable[[], str]): 'Doc.'", "type Callable, which has no JSON Schema"),
        ("def f(x: 'Nowhere'): 'Doc.'", "'Nowhere', cannot be read: .* TYPE_CHECKING"),
        ("f = lambda x: x", "a lambda has no name and no types. Write it as a function"),
        ("class f: pass", "f is no function. Give a function"),
        ("f = 3", "3 is no function"),
        ("f = math.sqrt", "math.sqrt can only be given by its place"),
        ("f = max", "max does not say what it takes"),
        (
            "def f(query: str):\n  '''Doc.\n\n  Args:\n    querry: It.\n  '''",
            "describes 'querry', which is no parameter. Did you mean query?",
        ),
    ],
)
def test_a_function_that_a_policy_could_not_call_is_refused_with_the_line_to_write(source, says):
    assert re.search(says, refused(source))
