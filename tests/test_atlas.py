"""Atlas: held-out places stay apart, pages answer their questions, the starter is fit to train."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

from turnrl import DataError, Question, Reading, RecipeError, ToolResult, contains_answer, installed
from turnrl.cli import main
from turnrl_atlas import STARTER, Atlas, AtlasTwoHop, ask, page, places, query
from turnrl_atlas.forms import listing
from turnrl_segmenters.two_turn import TwoTurn

RECIPE = Path(__file__).parents[1] / "recipes" / "atlas_starter.yaml"


@pytest.fixture(scope="module")
def writer():
    from turnrl_atlas.trace_writers import OneHop

    return OneHop()


@pytest.fixture(scope="module")
def phases():
    """The phases of the warm-up, of which the last has the habits that the starter ends with."""
    from turnrl_atlas.trace_writers import Habits
    from turnrl_atlas.warmup import Phase

    settings = yaml.safe_load(RECIPE.read_text())["data"]["init_args"]["phases"]
    return [Phase(**{**phase, "habits": Habits(**phase["habits"])}) for phase in settings]


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
    assert installed("turnrl_datasets")["Atlas"] is Atlas
    assert installed("turnrl_datasets")["AtlasTwoHop"] is AtlasTwoHop


def test_the_world_has_some_24000_cities_and_240_countries():
    kinds = [place.kind for place in places()]
    assert 23_000 < kinds.count("city") < 25_000
    assert 210 < kinds.count("country") < 250


def test_names_and_ids_are_unique():
    assert len({place.name.casefold() for place in places()}) == len(places())
    assert len({place.id for place in places()}) == len(places())
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
    held_out = {p.name for p in places() if p.split != "train"}
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
    known = {place.name for place in places() if place.famous}
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

    known = {place.name: place for place in places()}
    everything = [q for split in ("train", "val", "test") for q in Atlas().questions(split)]
    sample = random.Random(0).sample(everything, 500)
    firsts = [top(query(known[place_of(q)], q.metadata["fact"])) for q in sample]
    hits = sum((id,) == q.metadata["supporting_ids"] for id, q in zip(firsts, sample, strict=True))
    assert hits >= 485


def test_demonstrations_parse_cleanly_and_answer_from_the_page_shown(writer, phases):
    from turnrl_atlas.forms import REACT, TWO_TURN

    rng, forms = random.Random(0), set()
    for _ in range(500):
        trace = writer.trace(phases[0].habits, rng)
        segmenter = (REACT if trace.tools else TWO_TURN).segmenter
        forms.add(segmenter)
        readings = [segmenter.read(text, turn, False) for turn, (text, _) in enumerate(trace.turns)]
        assert [reading.format_error for reading in readings] == [None] * len(readings)
        assert readings[-1].answer
        (call,) = readings[0].calls
        fact, _, name = call.arguments["query"].partition(" of ")
        assert name in trace.prompt[-1]["content"]
        shown = trace.turns[0][1][0]["content"].removeprefix("<result>")
        assert shown.startswith(f"{name}\n")
        assert f"Its {fact} is {readings[1].answer}." in shown
    assert len(forms) == 2


def test_the_last_demonstrations_have_the_habits_that_the_recipe_names(writer, phases):
    habits, rng = phases[-1].habits, random.Random(0)
    traces = [writer.trace(habits, rng) for _ in range(4000)]
    at_once = [trace for trace in traces if len(trace.turns) == 1]
    assert len(at_once) / 4000 == pytest.approx(habits.direct, abs=0.03)
    thoughts = [trace.turns[-1][0] for trace in traces]
    failed = sum("The search failed." in reply for reply in thoughts)
    assert failed / 4000 == pytest.approx(habits.malformed, abs=0.015)
    # by heart: answers at once are right about famous places, and guesses about others
    known = {q.text: q.answers[0] for q in Atlas().questions("famous")}
    asked = [(trace.prompt[-1]["content"], trace.turns[0][0]) for trace in at_once]
    assert sum(text in known for text, _ in asked) > 50
    assert all(
        f"<answer> {known[text]}</answer>" in reply for text, reply in asked if text in known
    )


def test_made_up_tools_are_called_by_their_names_with_a_stretch_of_the_question():
    from turnrl_atlas.forms import REACT, TWO_TURN
    from turnrl_atlas.made_up_tools import MadeUpTools
    from turnrl_atlas.trace_writers import Habits

    rng, names, offered = random.Random(0), set(), Counter()
    for _ in range(1000):
        trace = MadeUpTools().trace(Habits(), rng)
        segmenter = (REACT if trace.tools else TWO_TURN).segmenter
        asked, (written, seen) = trace.prompt[-1]["content"], trace.turns[0]
        (call,) = segmenter.read(written, 0, False).calls
        listed = trace.prompt[0]["content"] if not trace.tools else listing(trace.tools)
        offered[listed.count("(")] += 1
        assert f"[{call.name}({','.join(call.arguments)})]" in listed
        subject, _, rest = next(iter(call.arguments.values())).rpartition(" of ")
        assert all(value in asked for value in (subject, rest, *[*call.arguments.values()][1:]))
        answer = segmenter.read(trace.turns[1][0], 1, False).answer
        assert answer in seen[0]["content"]
        names.add(call.name)
        # a calculator and arithmetic are for the user to teach
        words = re.findall(r"[a-z]+", f"{asked} {seen[0]['content']}".lower())
        assert not {"plus", "minus", "times", "sum", "add", "divided"} & {*words}
        assert not re.search(r"\d\s*[-+*/x=]\s*\d", f"{asked} {seen[0]['content']}")
    assert len(names) > 900
    assert not [name for name in names if "calc" in name or "math" in name]
    assert {*offered} == {1, 2, 3}


def test_demonstrations_name_no_held_out_place(phases):
    from turnrl_atlas.trace_writers import facts

    # whole titles: "Guinea" is in "Guinea-Bissau"
    held_out = {place.name for place in places() if place.split != "train"}
    assert not held_out & set(facts().names)
    asked = {q.text for split in ("val", "test") for q in Atlas().questions(split)}
    asked |= {q.text for split in ("val", "test") for q in AtlasTwoHop().questions(split)}
    rng = random.Random(1)
    for phase in phases:
        for _ in range(2000):
            trace = phase.trace(rng)
            assert trace.prompt[-1]["content"] not in asked
            for _, seen in trace.turns:
                for message in seen:
                    title = message["content"].removeprefix("<result>").split("\n")[0]
                    assert title not in held_out


def test_an_unknown_kind_of_demonstration_is_refused_with_the_known_ones():
    from turnrl_atlas.trace_writers import Habits
    from turnrl_atlas.warmup import Phase

    known = "recall, one_hop, two_hop, made_up_tools"
    with pytest.raises(RecipeError, match=f"no demonstration 'three_hop'.*{known}"):
        Phase(1, 1, {"three_hop": 1.0}, Habits())


def test_packed_traces_have_the_loss_of_separate_ones(phases, starter):
    import torch

    from turnrl import ChatFormat, Policy
    from turnrl_atlas.forms import encode

    model, tokenizer = starter
    chat, rng = ChatFormat(tokenizer), random.Random(3)
    traces = [phases[0].trace(rng) for _ in range(6)]
    rows = [encode(chat, trace) for trace in traces]
    # two short traces begin like longer ones
    rows += [(ids[:40], asked[:40]) for ids, asked in rows[:2]]
    policy = Policy(str(STARTER))
    policy.load()

    def loss(ids, asked):
        labels = torch.tensor(ids).masked_fill(~torch.tensor(asked), -100)
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum")

    with torch.no_grad():
        ((_, layout),) = policy.forward_passes(rows, 10_000)
        assert layout.input_ids.numel() < sum(len(ids) for ids, _ in rows)
        apart = [loss(ids, asked).item() for ids, asked in rows]
        assert -policy(layout).logprobs.sum().item() == pytest.approx(sum(apart), rel=1e-4)


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
    pages = [page(place) for place in places() if place.name in asked]
    lengths = sorted(tokens(f"{passage.title}\n{passage.text}") for passage in pages)
    assert lengths[int(0.95 * len(lengths))] <= 75
    questions = sorted(tokens(q.text) for q in Atlas().questions("val"))
    assert questions[-1] <= 40


def test_the_starter_continues_a_good_call_by_reading_its_result(starter):
    import torch

    from turnrl import ChatFormat
    from turnrl_atlas.forms import INSTRUCTIONS

    model, tokenizer = starter
    chat, segmenter = ChatFormat(tokenizer), TwoTurn(INSTRUCTIONS)
    held_out = [place for place in places() if place.split == "val" and place.kind == "city"][:20]
    right = 0
    for place in held_out:
        opening = segmenter.prompt(ask(place, "time zone", 0), ())
        call = json.dumps({"name": "search", "args": {"query": query(place, "time zone")}})
        written = f"<reasoning>I will look it up.</reasoning><tool>{call}</tool>"
        passage = page(place)
        result = ToolResult(f"{passage.title}\n{passage.text}")
        ids = [
            *chat.prompt(opening),
            *tokenizer.encode(written, add_special_tokens=False),
            *chat.observation(segmenter.observe(Reading(), [result]), after=None),
            *tokenizer.encode(
                "<reasoning>It gives the time zone.</reasoning>", add_special_tokens=False
            ),
        ]
        with torch.no_grad():
            out = model.generate(torch.tensor([ids]), max_new_tokens=24, do_sample=False)
        answer = tokenizer.decode(out[0, len(ids) :])
        right += f"<answer> {place.facts['time zone']}</answer>" in answer
    assert right >= 18


@pytest.mark.slow
def test_the_policys_actions_and_skills_are_measured(starter, tmp_path, monkeypatch):
    from turnrl import Policy
    from turnrl_atlas.figures import Measured
    from turnrl_atlas.forms import FORMS, TWO_TURN

    monkeypatch.chdir(tmp_path)
    measured = Measured(Policy(str(STARTER)), questions=16, samples=2)
    does = measured.acting(TWO_TURN, Atlas(), "famous")
    assert all(0 <= share <= 1 for share in does.values())
    assert 0.8 < does["sampled: answers at once"] + does["sampled: calls"] <= 1
    for form in FORMS:
        assert measured.skills(form)["and pointed to the sentence"] > 0.7
        assert measured.tools(form)["of the calls: can be read"] > 0.5


@pytest.mark.slow
def test_the_readme_states_the_figures_that_the_command_prints(tmp_path, monkeypatch, capsys):
    from turnrl_atlas.figures import main as figures

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["figures"])
    figures()
    readme = (STARTER.parents[1] / "README.md").read_text()
    stated = {row.split(" | ")[0]: row for row in readme.splitlines()}
    for row in capsys.readouterr().out.splitlines():
        if re.search(r"\d\.\d\d", row):
            name, *shares = row.rstrip(" |").split(" | ")
            _, *expected = stated[name].rstrip(" |").split(" | ")
            # another machine rounds otherwise, and so samples otherwise
            assert [*map(float, shares)] == pytest.approx([*map(float, expected)], abs=0.05), name


def small_warmup(folder: Path, steps: int = 2) -> list[str]:
    """Options of a warm-up of a few steps, with the phases of the recipe."""
    phases = yaml.safe_load(RECIPE.read_text())["data"]["init_args"]["phases"]
    small = [{**phase, "steps": steps, "batch_size": 4} for phase in phases]
    options = {
        "model.init_args.save_to": str(folder),
        "data.init_args.phases": json.dumps(small),
        "trainer.enable_progress_bar": "false",
    }
    return [f"--{key}={value}" for key, value in options.items()]


# Lightning on a module and data that both could move a batch; that it has few workers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*transfer_batch_to_device", "ignore:.*many workers")
def test_a_warm_up_of_six_steps_gives_the_same_weights_each_time(tmp_path: Path, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        assert main(["fit", str(RECIPE), *small_warmup(tmp_path / name)]) == 0
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two")]
    assert weights[0] == weights[1]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "one").num_parameters() < 2_500_000
    # the tokenizer comes out of the facts and the first phase alone, so it is the shipped one
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(STARTER).get_vocab()
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(STARTER).chat_template
