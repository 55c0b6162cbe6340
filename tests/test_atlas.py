"""Atlas: held-out places stay apart, pages answer their questions, the starter is fit to train."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys

import pytest

from turnrl import DataError, Question, Reading, ToolResult
from turnrl.plugin.hooks import load_classes
from turnrl.rewards.answers import contains_answer
from turnrl_atlas import (
    STARTER,
    Atlas,
    AtlasTwoHop,
    load_places,
    make_page,
    make_query,
    make_question,
)
from turnrl_segmenters.two_turn import TwoTurn


@pytest.fixture(scope="module")
def starter():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    return AutoModelForCausalLM.from_pretrained(STARTER), AutoTokenizer.from_pretrained(STARTER)


def place_of(question: Question) -> str:
    return question.metadata["place"]


def test_importing_the_plugin_loads_no_machine_learning():
    heavy = ("torch", "lightning", "transformers")
    code = f"import sys, turnrl_atlas; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_plugin_brings_its_data_sets():
    assert load_classes("turnrl_datasets")["Atlas"] is Atlas
    assert load_classes("turnrl_datasets")["AtlasTwoHop"] is AtlasTwoHop


def test_the_world_has_some_24000_cities_and_240_countries():
    kinds = [place.kind for place in load_places()]
    assert 23_000 < kinds.count("city") < 25_000
    assert 210 < kinds.count("country") < 250


def test_names_and_ids_are_unique():
    assert len({place.name.casefold() for place in load_places()}) == len(load_places())
    assert len({place.id for place in load_places()}) == len(load_places())
    ids = [
        question.id
        for split in ("train", "val", "test", "famous")
        for question in Atlas().questions(split)
    ]
    assert len(set(ids)) == len(ids)


def test_questions_come_in_the_same_order_every_time():
    code = "from turnrl_atlas import Atlas; print([q.id for q in Atlas().questions('val')][:20])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == str([q.id for q in Atlas().questions("val")][:20])


def test_held_out_places_occur_in_no_training_question_or_answer():
    held_out = {p.name for p in load_places() if p.split != "train"}
    asked = {place_of(q) for split in ("val", "test") for q in Atlas().questions(split)}
    assert asked <= held_out
    for question in Atlas().questions("train"):
        assert place_of(question) not in held_out
        if question.metadata["fact"] in ("country", "capital"):
            assert question.answers[0] not in held_out
    val, test = ({place_of(q) for q in Atlas().questions(split)} for split in ("val", "test"))
    assert not val & test


def test_four_training_questions_out_of_five_are_about_famous_places_and_no_held_out_one():
    def share(split: str) -> float:
        questions = list(Atlas().questions(split))
        return sum(q.metadata["famous"] for q in questions) / len(questions)

    assert share("train") == pytest.approx(0.8, abs=0.001)
    assert share("val") == share("test") == 0


@pytest.mark.parametrize("source", [Atlas, AtlasTwoHop])
def test_famous_questions_are_about_famous_places_that_no_training_question_asks_about(source):
    famous = list(source().questions("famous"))
    known = {place.name for place in load_places() if place.famous}
    assert {place_of(q) for q in famous} <= known
    assert not {place_of(q) for q in famous} & {place_of(q) for q in source().questions("train")}
    assert len(famous) == {Atlas: 500, AtlasTwoHop: 184}[source]
    facts = {q.metadata["fact"] for q in source().questions("val")}
    assert facts <= {q.metadata["fact"] for q in famous}


def test_every_question_is_answered_by_its_page():
    pages = {passage.id: passage for passage in Atlas().passages()}
    for split in ("train", "val", "test", "famous"):
        for question in Atlas().questions(split):
            (page_id,) = question.metadata["supporting_ids"]
            passage = pages[page_id]
            assert passage.title == place_of(question)
            assert contains_answer(passage.text, question)


def test_an_unknown_split_is_refused_with_the_known_ones():
    with pytest.raises(DataError, match="no split 'dev'; it has train, val, test, famous"):
        Atlas().questions("dev")


def test_the_good_query_finds_its_page_first():
    tantivy = pytest.importorskip("tantivy")
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.simple())
    builder = builder.filter(tantivy.Filter.lowercase()).filter(tantivy.Filter.stopword("english"))
    analyzer = builder.filter(tantivy.Filter.stemmer("english")).build()
    schema = tantivy.SchemaBuilder()
    schema.add_text_field("id", stored=True, tokenizer_name="raw")
    schema.add_text_field("body", tokenizer_name="english")
    index = tantivy.Index(schema.build())
    index.register_tokenizer("english", analyzer)
    writer = index.writer(50_000_000, 1)
    for passage in Atlas().passages():
        writer.add_document(
            tantivy.Document(id=passage.id, body=f"{passage.title}\n{passage.text}")
        )
    writer.commit()
    writer.wait_merging_threads()
    index.reload()
    searcher = index.searcher()

    def top(text: str) -> str | None:
        words = " ".join(re.findall(r"\w+", text.lower()))
        hits = searcher.search(index.parse_query(words, ["body"]), 1, count=False).hits
        return searcher.doc(hits[0][1])["id"][0] if hits else None

    known = {place.name: place for place in load_places()}
    everything = [q for split in ("train", "val", "test") for q in Atlas().questions(split)]
    sample = random.Random(0).sample(everything, 500)
    firsts = [top(make_query(known[place_of(q)], q.metadata["fact"])) for q in sample]
    hits = sum((id,) == q.metadata["supporting_ids"] for id, q in zip(firsts, sample, strict=True))
    assert hits >= 485


def test_the_starter_is_small_and_complete(starter):
    model, tokenizer = starter
    assert sum(path.stat().st_size for path in STARTER.iterdir()) <= 8_000_000
    assert model.num_parameters() < 2_500_000
    assert model.config.architectures == ["Qwen2ForCausalLM"]
    assert model.config.tie_word_embeddings
    assert len(tokenizer) == model.config.vocab_size == 1024
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    text = 'Ürümqi’s <tool>{"name": 5}</tool>\n日本'
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_pages_are_short_and_prompts_too(starter):
    _, tokenizer = starter

    def tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    # only pages that a question leads to
    asked = {place_of(q) for split in ("train", "val") for q in Atlas().questions(split)}
    pages = [make_page(place) for place in load_places() if place.name in asked]
    lengths = sorted(tokens(f"{passage.title}\n{passage.text}") for passage in pages)
    assert lengths[int(0.95 * len(lengths))] <= 75
    questions = sorted(tokens(q.text) for q in Atlas().questions("val"))
    assert questions[-1] <= 40


def test_the_starter_continues_a_good_call_by_reading_its_result(starter):
    import torch

    from turnrl.agent.chat import ChatFormat

    model, tokenizer = starter
    chat, segmenter = ChatFormat(tokenizer), TwoTurn("Tools: [search(query)]")
    held_out = [place for place in load_places() if place.split == "val" and place.kind == "city"][
        :20
    ]
    right = 0
    for place in held_out:
        opening = segmenter.prompt(make_question(place, "time zone", 0), ())
        call = json.dumps({"name": "search", "args": {"query": make_query(place, "time zone")}})
        written = f"<reasoning>I will look it up.</reasoning><tool>{call}</tool>"
        passage = make_page(place)
        result = ToolResult(f"{passage.title}\n{passage.text}")
        ids = [
            *chat.encode_prompt(opening),
            *tokenizer.encode(written, add_special_tokens=False),
            *chat.encode_observation(segmenter.observe(Reading(), [result]), after=None),
            *tokenizer.encode(
                "<reasoning>It gives the time zone.</reasoning>", add_special_tokens=False
            ),
        ]
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        answer = tokenizer.decode(out[0, len(ids) :])
        right += f"<answer> {place.facts['time zone']}</answer>" in answer
    assert right >= 18
