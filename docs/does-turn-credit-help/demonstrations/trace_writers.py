"""Trace writers, one for each kind of demonstration, with given habits.

    Recall        a question about a famous place, answered correctly at once
    OneHop        a question of `Atlas`: a search, then the answer
    TwoHop        a question of `AtlasTwoHop`: searches for a country and a fact, then the answer
    MadeUpTools   in made_up_tools.py: a call of a tool that does not exist, then the answer

The right behaviour stays within reach: each habit departs from it in one or two tokens.
"""

from __future__ import annotations

import random
import string
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cache

from demonstrations.forms import FORMS, REACT, SEARCH, Form, Trace, Turn
from turnrl import ToolResult
from turnrl_atlas.world import (
    QUESTIONS,
    TWO_HOP_FACTS,
    Kind,
    Place,
    count_wordings,
    countries_by_name,
    load_places,
    make_page,
    make_query,
    make_question,
    make_two_hop_question,
)

KNOW, LOOK_UP, FAILED = "I know this.", "I will look it up.", "The search failed."
"""Thoughts before an answer from memory, before a call, and after a call that failed."""


@dataclass(frozen=True)
class Habits:
    """The frequency of each habit in the demonstrations, from 0 to 1; all other traces call well.

    Args:
        direct: Answers at once.
        malformed: Makes a call that cannot work.
        vague: Searches for the wrong thing, or gives a tool the wrong part of the question.
        hasty: Answers before the second page was read, if two are needed.
        reading: Frequency of reading the right part of a result.
        made_up: Frequency of made-up places and values; otherwise the place is real.
        famous: Frequency of famous places among real ones. An answer from memory is right for a
            famous place and a guess for any other.
    """

    direct: float = 0.0
    malformed: float = 0.0
    vague: float = 0.0
    hasty: float = 0.0
    reading: float = 1.0
    made_up: float = 0.5
    famous: float = 0.7


class Facts:
    """Places for demonstrations: the training places of Atlas, and made-up ones. Held-out places
    never occur."""

    def __init__(self) -> None:
        self._places: dict[tuple[Kind, bool], list[Place]] = {}
        self.values: dict[str, list[str]] = {fact: [] for fact in QUESTIONS}
        for place in load_places():
            if place.split == "train":
                self._places.setdefault((place.kind, place.famous), []).append(place)
                for fact, value in place.facts.items():
                    self.values[fact].append(value)
        self.names = [place.name for group in self._places.values() for place in group]
        famous = [place for kind in ("city", "country") for place in self._places[kind, True]]
        self.known = [
            make_question(place, fact, template)
            for place in famous
            for fact in place.facts
            for template in range(len(QUESTIONS[fact]))
        ]
        pairs = [(city, countries_by_name().get(city.facts.get("country", ""))) for city in famous]
        self.known_pairs = [(city, home) for city, home in pairs if home and home.famous]

    def real(self, rng: random.Random, famous: float, kind: Kind | None = None) -> Place:
        """A real place, famous with this probability."""
        kind = kind or _kind(rng)
        return rng.choice(self._places[kind, rng.random() < famous])

    def made_up(self, rng: random.Random, kind: Kind | None = None) -> Place:
        """A place that does not exist."""
        kind = kind or _kind(rng)
        return Place("made-up", self.name(rng), kind, self.facts(kind, rng), False, "train")

    def facts(self, kind: Kind, rng: random.Random) -> dict[str, str]:
        """A value for each fact of a kind of place, taken from another place or made up."""
        return {
            fact: rng.choice(self.values[fact]) if rng.random() < 0.5 else self._value(fact, rng)
            for fact in self._places[kind, True][0].facts
        }

    def name(self, rng: random.Random) -> str:
        """The front of one name and the back of another."""
        front, back = rng.choices(self.names, k=2)
        return front[: (len(front) + 1) // 2].rstrip(" -'") + back[len(back) // 2 :].lstrip(" -'")

    def recall(self, place: Place, fact: str, rng: random.Random, known: bool) -> str:
        """An answer from memory: the truth if `known`, else a guess."""
        return place.facts[fact] if known else rng.choice(self.values[fact])

    def _value(self, fact: str, rng: random.Random) -> str:
        if fact == "time zone":
            region = rng.choice(self.values[fact]).split("/")[0]
            return f"{region}/{self.name(rng).replace(' ', '_')}"
        if fact == "internet domain":
            return "." + "".join(rng.choices(string.ascii_lowercase, k=2))
        if fact in ("population", "phone code"):
            length = rng.randint(5, 7) if fact == "population" else rng.randint(1, 4)
            return rng.choice("123456789") + "".join(rng.choices(string.digits, k=length - 1))
        return self.name(rng)


@cache
def facts() -> Facts:
    """The places for demonstrations."""
    return Facts()


def _kind(rng: random.Random) -> Kind:
    return "city" if rng.random() < 0.7 else "country"


def _vague(kind: Kind, fact: str, rng: random.Random) -> str:
    return rng.choice((f"{fact} of a {kind}", f"{fact} of the world", f"{fact} of places"))


def shown(place: Place) -> ToolResult:
    """The result of a search that finds a place's page."""
    passage = make_page(place)
    return ToolResult(f"{passage.title}\n{passage.text}")


class TraceWriter(ABC):
    """Writes traces of one kind."""

    @abstractmethod
    def trace(self, habits: Habits, rng: random.Random) -> Trace:
        """One demonstration, a pure function of the state of `rng`."""


class Recall(TraceWriter):
    """Answers questions about famous places correctly at once, in both forms. A quarter of them ask
    for a fact of a famous city's country, in the form of `ReAct`."""

    def trace(self, habits: Habits, rng: random.Random) -> Trace:
        if rng.random() < 0.25:
            city, country = rng.choice(facts().known_pairs)
            fact = rng.choice(TWO_HOP_FACTS)
            question = make_two_hop_question(
                city, country, fact, rng.randrange(count_wordings(fact))
            )
            form = REACT
        else:
            question, form = rng.choice(facts().known), rng.choice(FORMS)
        return form.trace(question.text, [SEARCH], form.answering(KNOW, question.answers[0]))


class OneHop(TraceWriter):
    """Searches once, then answers: the questions of `Atlas`, in both forms."""

    def trace(self, habits: Habits, rng: random.Random) -> Trace:
        form, world = rng.choice(FORMS), facts()
        made_up = rng.random() < habits.made_up
        place = world.made_up(rng) if made_up else world.real(rng, habits.famous)
        fact = rng.choice(list(place.facts))
        question = make_question(place, fact, rng.randrange(len(QUESTIONS[fact])))
        draw = rng.random()
        if draw < habits.direct:
            value = world.recall(place, fact, rng, place.famous)
            return form.trace(question.text, [SEARCH], form.answering(KNOW, value))
        text = make_query(place, fact)
        if draw < habits.direct + habits.malformed:
            failed = form.malformed(SEARCH, {"query": text}, [SEARCH], rng)
            last = form.answering(FAILED, rng.choice(world.values[fact]))
            return form.trace(question.text, [SEARCH], form.calling(LOOK_UP, *failed), last)
        if draw < habits.direct + habits.malformed + habits.vague:
            text, place = _vague(place.kind, fact, rng), world.real(rng, famous=0.1)
        elif rng.random() < 0.5:  # so that the policy trusts the page, not its memory
            place = replace(place, facts=world.facts(place.kind, rng))
        call = form.call(SEARCH, {"query": text})
        turns = form.calling(LOOK_UP, call, shown(place)), _last(form, place, fact, habits, rng)
        return form.trace(question.text, [SEARCH], *turns)


class TwoHop(TraceWriter):
    """Searches for a city's country, then for that country's fact, then answers: the questions of
    `AtlasTwoHop` that take two pages, in the form of `ReAct`."""

    def trace(self, habits: Habits, rng: random.Random) -> Trace:
        world, direct = facts(), rng.random() < habits.direct
        city, country = self._pair(direct, habits, rng)
        fact = rng.choice(TWO_HOP_FACTS)
        question = make_two_hop_question(city, country, fact, rng.randrange(count_wordings(fact)))
        if direct:
            is_known = city.famous and country.famous
            last = REACT.answering(KNOW, world.recall(country, fact, rng, is_known))
            return REACT.trace(question.text, [SEARCH], last)
        turns: list[Turn] = []
        needed, thought = [(city, "country"), (country, fact)], LOOK_UP
        while needed:
            last_turn = len(turns) == REACT.segmenter.max_turns - 1
            if last_turn or (turns and rng.random() < habits.hasty):
                value = world.recall(country, fact, rng, country.famous)
                return REACT.trace(question.text, [SEARCH], *turns, REACT.answering(KNOW, value))
            place, wanted = needed[0]
            text, draw = make_query(place, wanted), rng.random()
            if draw < habits.malformed:
                call, result = REACT.malformed(SEARCH, {"query": text}, [SEARCH], rng)
            else:
                if draw < habits.malformed + habits.vague:
                    astray = [(_vague(place.kind, wanted, rng), world.real(rng, famous=0.1))]
                    if place is country:  # the fact, but of the city, whose page was read already
                        astray.append((make_query(city, fact), city))
                    text, place = rng.choice(astray)
                else:
                    del needed[0]
                call, result = REACT.call(SEARCH, {"query": text}), shown(place)
            turns.append(REACT.calling(thought, call, result))
            if len(needed) == 1:
                thought = "It gives the country."
        last = _last(REACT, country, fact, habits, rng)
        return REACT.trace(question.text, [SEARCH], *turns, last)

    def _pair(self, true: bool, habits: Habits, rng: random.Random) -> tuple[Place, Place]:
        """A city, perhaps made up, and its country.

        Unless `true`, the pages often contradict the facts, so that the policy trusts the page, not
        its memory.
        """
        world = facts()
        if rng.random() < habits.made_up:
            city = world.made_up(rng, "city")
        else:
            city = world.real(rng, habits.famous, "city")
            if not true and rng.random() < 0.5:
                city = replace(city, facts=world.facts("city", rng))
        name = city.facts["country"]
        country = countries_by_name().get(name)
        if country is None or (not true and rng.random() < 0.5):
            values = world.facts("country", rng)
            country = Place("made-up", name, "country", values, False, "train")
        return city, country


def _last(form: Form, place: Place, fact: str, habits: Habits, rng: random.Random) -> Turn:
    """The answer from a place's page, read in the sentence of `fact` or in another sentence."""
    if fact not in place.facts or rng.random() >= habits.reading:
        fact = rng.choice([name for name in place.facts if name != fact])
    return form.answering(f"It gives the {fact}.", place.facts[fact])
