"""Atlas in two hops: questions that take two pages, and what one search can reach."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from turnrl_atlas import TWO_HOP_FACTS, Atlas, AtlasTwoHop, places
from turnrl_wiki_search import WikiSearch

from turnrl import (
    DataError,
    Question,
    ToolCall,
    contains_answer,
    exact_match,
)

ROOT = Path(__file__).parents[1]
README = ROOT / "plugins" / "turnrl-atlas" / "README.md"


@pytest.fixture(scope="module")
def search(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexes") / "atlas"
    tool = WikiSearch(str(folder), build_from="Atlas", top_k=1)
    tool.check()
    return tool


def two_hops(split: str) -> list[Question]:
    return [q for q in AtlasTwoHop().questions(split) if q.metadata["hops"] == 2]


def found(search: WikiSearch, queries: list[str]) -> list[str]:
    """The page that each query brings."""
    return [r.content for r in search.run([ToolCall("search", {"query": q}) for q in queries])]


def sentence(text: str, fact: str) -> str:
    """The value of a fact, read from a page by itself."""
    return re.search(rf"Its {fact} is (.+?)\.(?: Its|$)", text)[1]


def test_an_answer_is_found_by_walking_over_two_pages():
    pages = {passage.title: passage.text for passage in AtlasTwoHop().passages()}
    assert pages == {passage.title: passage.text for passage in Atlas().passages()}
    ids = {passage.title: passage.id for passage in AtlasTwoHop().passages()}
    for split in ("train", "val", "test"):
        for question in two_hops(split):
            asked = question.metadata
            country = sentence(pages[asked["place"]], "country")
            assert country == asked["country"]
            assert question.answers == (sentence(pages[country], asked["fact"]),)
            assert asked["place"] in question.text
            assert asked["supporting_ids"] == (ids[asked["place"]], ids[country])


def test_a_question_names_the_city_and_not_the_country():
    for question in two_hops("val"):
        without_the_city = question.text.replace(question.metadata["place"], "")
        assert question.metadata["country"] not in without_the_city
        assert "the country" in question.text


def test_held_out_cities_and_countries_occur_in_no_training_question_or_answer():
    held_out = {p.name for p in places() if p.split != "train"}
    for split in ("val", "test"):
        for question in two_hops(split):
            assert {question.metadata["place"], question.metadata["country"]} <= held_out
    for question in AtlasTwoHop().questions("train"):
        assert not {question.metadata["place"], question.metadata.get("country")} & held_out
        if question.metadata["fact"] in ("country", "capital"):
            assert question.answers[0] not in held_out
    val, test = ({q.metadata["country"] for q in two_hops(split)} for split in ("val", "test"))
    assert not val & test


def test_splits_have_the_sizes_and_the_mixture_that_the_readme_tells():
    sizes = {split: len(list(AtlasTwoHop().questions(split))) for split in ("train", "val", "test")}
    assert (sizes["val"], sizes["test"]) == (500, 2000)
    assert 20_000 < sizes["train"] < 22_000
    hops = Counter(q.metadata["hops"] for q in AtlasTwoHop().questions("train"))
    assert hops[2] == 3 * hops[1]
    assert {q.metadata["hops"] for q in AtlasTwoHop().questions("val")} == {2}
    ids = [q.id for split in sizes for q in AtlasTwoHop().questions(split)]
    assert len(set(ids)) == len(ids)
    with pytest.raises(DataError, match="AtlasTwoHop has no split 'dev'; it has train, val, test"):
        AtlasTwoHop().questions("dev")


def test_two_searches_find_the_answer(search):
    questions = two_hops("val")
    first = found(search, [f"country of {q.metadata['place']}" for q in questions])
    homes = [sentence(text, "country") if "Its country" in text else "" for text in first]
    pairs = zip(questions, homes, strict=True)
    second = found(search, [f"{q.metadata['fact']} of {home}" for q, home in pairs])
    right = sum(
        f"Its {q.metadata['fact']} is {q.answers[0]}." in text
        for q, text in zip(questions, second, strict=True)
    )
    assert right / len(questions) >= 0.95


def readings(text: str) -> dict[str, str]:
    """What a fixed policy can make of a page: each fact, and the parts of a time zone."""
    facts = dict(re.findall(r"Its ([a-z ]+) is (.+?)\.(?= Its|$)", text))
    region, _, city = facts.get("time zone", "").replace("_", " ").rpartition("/")
    return {**facts, "region": region, "zone": city}


def test_one_search_reaches_the_floor_that_the_readme_states(search):
    questions = two_hops("val")
    shown = {
        "raw": found(search, [q.text for q in questions]),
        "city": found(search, [f"country of {q.metadata['place']}" for q in questions]),
    }
    floors = Counter()
    for name, pages in shown.items():
        pairs = zip(pages, questions, strict=True)
        floors[name] = sum(contains_answer(text, q.answers) for text, q in pairs)
    # the best policy that copies the same part of the city's page whenever it is asked for a fact,
    # or gives the same value
    home = [place for place in places() if place.kind == "country" and place.split == "train"]
    for fact in TWO_HOP_FACTS:
        commonest, _ = Counter(place.facts[fact] for place in home).most_common(1)[0]
        right: Counter[str] = Counter()
        for question, text in zip(questions, shown["city"], strict=True):
            if question.metadata["fact"] == fact:
                tried = readings(text) | {"commonest": commonest}
                right.update(k for k, v in tried.items() if exact_match(v, question.answers))
        floors["fixed"] += max(right.values(), default=0)
    stated = re.findall(
        r"^\| the (?:question as|city's page).+\| ([0-9.]+) \|$", README.read_text(), re.M
    )
    assert stated == [f"{floors[name] / len(questions):.2f}" for name in ("raw", "city", "fixed")]
