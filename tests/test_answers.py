"""How answers compare: each rule beside a naive reading, and one rule wherever answers count."""

from __future__ import annotations

import csv
import dataclasses
import logging
import pickle
import random
import re
import string
import time
from fractions import Fraction
from pathlib import Path

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import turnrl_rewards
from trajectories import sampled_turn, trajectory
from turnrl import (
    AnswerRule,
    DataError,
    Question,
    QuestionData,
    Reading,
    RecipeError,
    ToolCall,
    ToolResult,
    answer_in_results,
    exact_match,
    hookimpl,
    load_questions,
    score_group,
)
from turnrl.cli import main
from turnrl.data.rows import field_text, to_native
from turnrl.plugin.errors import PluginError
from turnrl.plugin.hooks import load_plugins
from turnrl.rewards.answers import contains_answer, is_empty_answer, is_searchable, usable_answers
from turnrl.rewards.scoring import Tally, compute_curves, tally_groups
from turnrl.runs import record
from turnrl.types import Phrase, answer_rule
from turnrl_rewards import F1, FirstHit
from turnrl_rewards.answers import Choice, Math, Number
from turnrl_rewards.qa import AnswerPresent, AnswerRetrieved, ExactMatch, WellFormed

PAIRS = 4_000


def asking(*answers: str, rule: AnswerRule | None = None, text: str = "What?") -> Question:
    return Question("q", text, answers, rule=rule or Phrase())


# ------------------------------------------------------------ each rule beside a naive reading


def squad(text):
    """The steps of SQuAD's evaluation script, one by one."""
    text = text.lower()
    text = "".join(character for character in text if character not in set(string.punctuation))
    text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


PIECES = ["the", "The", "a", "An", "Peru", "peru", "of", "Lord", "U.S.", "1.5", "15", "-5", "é"]
PIECES += [" ", "  ", "-", ".", ",", "'s", "!", "\t", "theatre", "can't", "\N{EN DASH}"]


def test_phrases_compare_as_squad_compares_them():
    draw, hits = random.Random(0), 0
    for _ in range(PAIRS):
        first, second = (draw.choices(PIECES, k=draw.randint(0, 3)) for _ in range(2))
        if draw.random() < 0.3:  # the same with one more piece
            second = [*first, draw.choice(PIECES)]
        first, second = "".join(first), "".join(second)
        same = squad(first) == squad(second) != ""
        assert exact_match(first, asking(second)) == same, (first, second)
        hits += same
    assert PAIRS / 100 < hits < PAIRS / 2


HALF = Fraction(1, 2)


def naive_number(text):
    text = text.strip().rstrip(".").replace("\N{MINUS SIGN}", "-").replace("minus ", "-")
    text = text.removesuffix(" apples").removeprefix("The answer is ").removeprefix("#### ")
    text = re.sub("[$%]", "", text)
    if re.search(r",(?!\d{3}(?!\d))", text) or re.search("[a-df-z]", text):
        return None
    top, _, below = text.replace(",", "").partition("/")
    try:
        return Fraction(top) / Fraction(below or "1")
    except (ValueError, ZeroDivisionError):
        return None


def written_in_words(draw, value):
    """A number, written in one of the common ways."""
    sign, size = ("-" if value < 0 else ""), abs(value)
    ways = [f"{sign}{size:.2f}", f"{sign}${size:,.2f}", f"{sign}{size:.2f}%", f"{sign}{size:e}"]
    ways += [f"\N{MINUS SIGN}{size:.2f}" if sign else f"+{size:.2f}", f"{sign}{size:,.2f}"]
    if value == int(value):
        ways += [
            f"{sign}{size:.0f}",
            f"{sign}{size:,.0f}",
            f"{sign}{size:.1f}",
            f"{sign}0{size:.0f}",
        ]
        ways += [f"{sign}{size:.0f}.", f"{sign}{size * 2:.0f}/2", f"{sign}{size:.0f}/0"]
        ways += [f"minus {size:.0f}"] if sign else [f"{size:.0f} apples", f"#### {size:.0f}"]
    return f"The answer is {draw.choice(ways)}" if draw.random() < 0.2 else draw.choice(ways)


ODD = ["five", "nan", "NaN", "inf", "-inf", "Infinity", "", " ", "-", "$", "1,00", "12,34", "Paris"]


def test_numbers_compare_as_a_naive_reading_compares_them():
    draw, hits = random.Random(1), {0.0: 0, 0.5: 0}
    rules = {tolerance: Number(tolerance) for tolerance in hits}
    values = [0, 5, -5, 15, 1.5, 0.5, 1000, 1000.5, 12345, -1234567, 0.25, 12]
    for _ in range(PAIRS):
        left, right = (
            draw.choice(ODD) if draw.random() < 0.1 else written_in_words(draw, draw.choice(values))
            for _ in range(2)
        )
        first, second = naive_number(left), naive_number(right)
        for tolerance, rule in rules.items():
            same = None not in (first, second) and abs(first - second) <= Fraction(str(tolerance))
            assert exact_match(left, asking(right, rule=rule)) == same, (left, right)
            assert rule.read(left) == first, left
            hits[tolerance] += same
    assert all(PAIRS / 50 < count < PAIRS / 2 for count in hits.values())


NUMBERS = {
    5: "5; 5.; $5; US$5; ５; 5 kg; $5/day; x = 5; f(2) = 5; 2 + 3 = 5; (5); The answer is 5.",
    1000: r"1,000; 1{,}000; 1e3; 1000 apples; **Answer:** 1000.; \boxed{\text{So: }1000}",
    -5: r"-5; - 5; x = - 5; minus 5; −5; $-5$; -\boxed{5}; **-5**; I think it's -5",
    HALF: r"1/2; .5; 50e-2; \frac{1}{2}; \boxed{\dfrac{1}{2}}; 0.5, that is 1/2; 0.5%",
    42: r"42 - for sure; I think 42, so 42.0; B52: 42; 42\%",
    None: r"five; nan; 1/0; 42 or 43; 10-4; 3–5; 1 000; 2 1/2; 2½; 10³; 5 m²; 5 + 5; 5*5; 5 × 5; "
    r"2**3; 2^3; 10^{3}; -(5); 2(2); |-5|; 5!; x - 5; 8 = 5 + 3; \sqrt{2}; 2\sqrt{3}; 5 \pi; "
    r"\frac{1}{x}; sqrt(2); log(8); half of 10; 5 million; 2x; 18 x; 18π; 5th; $5M; 1010₂; "
    "COVID-19; 5/12/2020; 10:30; 1.2.3; 1,5; > 5; x >= 5; ≧ 5; 5+; at least 5; 5 or more; up to 5; "
    r"max 5; minimum: 5; lower bound 5; nearly 5; not 5; isn't 5; not \boxed{5}; x != 5; \neq 5; "
    f"no 5; 5? No; 5 is wrong; [5, ∞); 1e999999999; {'9' * 9999}",
}


@pytest.mark.parametrize(("number", "texts"), NUMBERS.items())
def test_a_number_is_the_one_of_its_text_and_nothing_that_changes_it(number, texts):
    read = {text: Number().read(text) for text in texts.split("; ")}
    assert read == dict.fromkeys(read, number)


@given(st.text(alphabet="0123456789.,-+eE/^x() %$\n*\\{}frac²½×=", max_size=40), st.floats(0, 2))
def test_any_text_reads_as_a_number_or_none(text, tolerance):
    rule = Number(tolerance, tolerance)
    assert rule.same(text, text) == (rule.read(text) is not None)
    assert not rule.occurs_in("", text)


def test_a_tolerance_is_absolute_or_a_share_of_the_accepted_number():
    assert exact_match("3.15", asking("3.14", rule=Number(0.01)))  # in floats 3.15 - 3.14 > 0.01
    assert not exact_match("3.16", asking("3.14", rule=Number(0.01)))
    assert exact_match("101", asking("100", rule=Number(relative=0.01)))
    # 1.005 is more than 1 % of 100, and less than 1 % of 101.005
    assert not exact_match("101.005", asking("100", rule=Number(relative=0.01)))
    assert exact_match("100", asking("101.005", rule=Number(relative=0.01)))
    for options in ({"tolerance": -1}, {"relative": float("nan")}, {"tolerance": float("inf")}):
        with pytest.raises(RecipeError, match=r"Number\.(tolerance|relative)"):
            Number(**options)


OPTIONS = {
    "A": ["A. I. Newton", "A. B", "A) Paris B) Rome", "(A) or (B)", "A. Rome, so B"],
    "B": ["[b]", r"\boxed{\text{B}}", "B - Paris", "B) f(x) = 2", "The answer is (B)"],
    "C": ["Final answer: C. Rome", "C (Paris)", "It is C.", "I choose C", "C!", "\uff23", "**C**"],
    "D": ["D. George W. Bush", "D.\nIt is.", "D. Rome, so I would say D", "Option D"],
    "2": ["2", "2) x", "2. 3.5 kg"],
    None: [
        "A dog",
        "The answer is a dog",
        "e.g. Paris",
        "U.S.",
        "Paris",
        "",
        "1.5",
        "A or B",
        "AB",
    ],
    "": ["not A but B", "(B) is wrong", "B, because A is wrong", "B isn't right", "A, C"],
}


@pytest.mark.parametrize(("option", "texts"), OPTIONS.items())
def test_an_option_is_read_as_people_write_it(option, texts):
    option = option or None
    assert {text: Choice().read(text) for text in texts} == dict.fromkeys(texts, option)


@pytest.mark.parametrize("part", ["1", "1e500 ", "not 5 ", "1,", "10^", "\\frac{", "A. ", "{"])
def test_an_answer_of_any_length_is_read_in_time(part):
    text = f"A. {part * (20_000 // len(part))} 5"
    started = time.process_time()
    for rule in (Number(), Choice()):
        rule.read(text)
    assert not Number().occurs_in(text, "7")
    assert time.process_time() - started < 1  # .2 s each on an idle core


@pytest.mark.parametrize(("given_answer", "accepted", "right"), [
    *((r"\frac{1}{2}", "0.5", True), (r"$\frac12$", "1/2", True), ("15", "1.5", False)),
    *(("x^2+1", "1+x^2", True), (r"\sqrt{8}", r"2\sqrt{2}", True), ("[0,1]", "[0,1)", False)),
    *(("The answer is 42", "42", True), ("", "5", False)),
])  # fmt: skip
def test_expressions_are_compared_with_math_verify(given_answer, accepted, right):
    pytest.importorskip("math_verify")
    assert exact_match(given_answer, asking(accepted, rule=Math())) == right


def test_the_math_rule_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"'math-verify'.*pip install '\.\[math\]'"):
        QuestionData(answers="math")


# ------------------------------------------------------------------- the rule of a question set


def same_length(given_answer, accepted):
    return len(given_answer) == len(accepted)


def broken(given_answer, accepted):
    raise ZeroDivisionError("division by zero")


def test_a_rule_can_be_a_name_an_object_or_your_own_function():
    assert answer_rule("number") == Number()
    assert answer_rule("Choice") == Choice()
    assert answer_rule(Number(0.1)) == Number(0.1)
    for named in (same_length, f"{__name__}.same_length"):
        rule = answer_rule(named)
        assert exact_match("abc", asking("xyz", rule=rule))
        assert not exact_match("", asking("", rule=rule))
        assert not is_searchable(asking("xyz", rule=rule))


def test_a_question_can_be_pickled_with_its_rule():
    assert pickle.loads(pickle.dumps(asking("5", rule=Number()))).rule == Number()


class Reversed(AnswerRule):
    """A rule of a package."""

    def read(self, text):
        return text[::-1]


def test_a_package_can_add_a_rule_that_recipes_name(monkeypatch):
    with pytest.raises(RecipeError, match="'reversed', which is not a rule"):
        answer_rule("reversed")
    monkeypatch.setattr(turnrl_rewards, "turnrl_answers", hookimpl(lambda: [Reversed]))
    load_plugins.cache_clear()
    try:
        assert isinstance(answer_rule("reversed"), Reversed)
        with pytest.raises(RecipeError, match=r"not a rule\..* There are phrase, reversed\."):
            answer_rule("number")
    finally:
        load_plugins.cache_clear()


@pytest.mark.parametrize(("named", "message"), [
    ("numbr", "data.answers is 'numbr', which is not a rule. Did you mean number"),
    ("exact", "There are phrase, number, choice, math, the path of a function of two texts"),
    ("nowhere.same", "data.answers is 'nowhere.same', which cannot be imported ("),
    ("string.digits", "data.answers is 'string.digits', which cannot be called. Give a"),
    (3, "data.answers is 3, which cannot be called. Give a class or a function"),
    (len, "cannot be used: too many positional arguments"),
])  # fmt: skip
def test_an_unknown_rule_is_an_error(named, message):
    with pytest.raises(RecipeError, match=re.escape(message)):
        QuestionData(answers=named)


@pytest.mark.parametrize("returned", ["no", None, 1, 0.5])
def test_a_function_that_does_not_return_a_bool_is_an_error(returned):
    question = asking("x", rule=lambda answer, accepted: returned)
    message = f"on 'y' and 'x' returned {returned!r}. It must return True or False."
    with pytest.raises(PluginError, match=re.escape(message)):
        exact_match("y", question)
    assert exact_match("x", asking("x", rule=lambda answer, accepted: numpy.bool_(True)))


def test_a_function_that_raises_is_reported_with_its_arguments():
    question = asking("x", rule=answer_rule(f"{__name__}.broken"))
    what = r"data.answers .*broken on 'y' and 'x' raised ZeroDivisionError: division by zero"
    with pytest.raises(PluginError, match=what):
        exact_match("y", question)


def test_passing_answers_instead_of_a_question_is_an_error():
    with pytest.raises(PluginError, match=r"exact_match takes the question.*\('Peru',\)"):
        exact_match("Peru", ("Peru",))


def search(text, ok=True):
    reading = Reading((ToolCall("search", {"query": "x"}),))
    return sampled_turn("", (7,), (-0.5,), reading, (ToolResult(text, ok),))


def attempt(question, *turns, answer=None):
    last = [] if answer is None else [sampled_turn("", (7,), (-0.5,), Reading(answer=answer))]
    return trajectory(question, (1,), (*turns, *last), "turns" if answer is None else "answer")


@pytest.mark.parametrize(("rule", "accepted", "right", "wrong"), [
    (Number(), "1.5", ["1.50", "$1.5"], ["15", "-1.5", "1 or 5"]),
    (Number(), "-5", ["\N{MINUS SIGN}5.0", "minus 5"], ["5"]),
    (Choice(), "A", ["a", "(A)", "Answer: A"], ["B", "a dog"]),
    (Phrase(), "The Hague", ["hague!"], ["Hague city", "the"]),
    (Phrase(), "Sa\u0303o Paulo", ["S\u00e3o Paulo", "SA\u0303O paulo"], ["Sao Paulo"]),
    (Phrase(), "\u00e0 la carte", ["a\u0300 la carte"], ["la carte"]),  # no article
])  # fmt: skip
def test_rewards_and_curves_use_the_same_answer_rule(rule, accepted, right, wrong):
    question = asking(accepted, rule=rule)
    for answer in right + wrong:
        answered = attempt(question, answer=answer)
        paid = float(answer in right)
        assert compute_curves(answered)["exact_match"] == paid
        assert ExactMatch().score(answered) == paid
        if answer in right or rule != Phrase():
            assert F1().score(answered) == paid
            assert AnswerPresent(1.0).score(answered) == paid
        group = score_group([answered], [ExactMatch()])
        assert float(group.outcome[0]) == paid
        assert WellFormed().score(answered) == (0.0 if answer == "the" else 0.4)
    assert [*usable_answers(question)] == [accepted]


def test_an_answer_says_nothing_if_its_rule_leaves_nothing_of_it():
    assert is_empty_answer("the", asking("x"))
    assert is_empty_answer("...", asking("1", rule=Number()))
    assert not is_empty_answer("forty-two", asking("42", rule=Number()))
    assert not is_empty_answer("A", asking("A", rule=Choice()))
    assert is_empty_answer(None, asking("x"))
    assert not contains_answer("a page\u200b of it", asking("\u200b"))
    assert not exact_match("\u200b", asking("\u200b"))


def test_punctuation_is_no_expression():
    pytest.importorskip("math_verify")
    for text in ("...", " ", "\u200b", "$$", "-", "?!"):
        assert is_empty_answer(text, asking("5", rule=Math()))
        assert not exact_match(text, asking(text, rule=Math()))
    for text in ("5", "x", "\u2205", "()", "[]", r"\emptyset", "\u221e"):
        assert exact_match(text, asking(text, rule=Math()))


def letters(count=40):
    return [
        Question(f"q{i}", f"Which of the four is number {i}?", "ABCD"[i % 4]) for i in range(count)
    ]


def test_rows_that_are_left_out_are_counted_with_the_reason(caplog):
    odd = [Question("n", "No answer?"), Question("t", "", "x"), Question("q1", "Again?", "B")]
    with caplog.at_level(logging.WARNING):
        assert len(load_questions([*letters(), *odd, odd[2]])) == 31
    message = "left out 13 of 44 rows (10 with an answer of articles and punctuation, 1 without an "
    message += "answer, 1 without a question, 1 repeated)"
    assert message in caplog.text
    caplog.clear()
    assert len(load_questions(letters(), rule=Choice())) == 40
    assert not caplog.records
    kept = load_questions([*letters(), Question("n", "How many?", "12")], rule=Number())
    assert [q.answers for q in kept] == [("12",)]
    assert "40 with an answer that is not a number" in caplog.text


@pytest.mark.parametrize(("answers", "setting"), [
    (["1.5", "-2", "$1,000", "50%", "1/2", "Paris"], "number"),
    (["B", "(C)", "D.", "b"], "choice"), ([r"\frac{1}{2}", "$x$", "x^2", "Paris"], "math"),
    (["Paris", "15", "B", "x^2"], None),
])  # fmt: skip
def test_a_rule_that_does_not_fit_the_answers_gets_one_warning(answers, setting, caplog):
    questions = [Question(str(i), f"Which {i}?", answer) for i, answer in enumerate(answers)]
    data = QuestionData(questions, questions)
    data.setup("fit")
    messages = [r.message for r in caplog.records if "Set data.answers to" in r.message]
    assert len(messages) == (setting is not None)
    assert all(f"Set data.answers to {setting}" in message for message in messages)
    caplog.clear()
    QuestionData(questions, questions, answers="phrase").setup("fit")
    assert "Set data.answers" not in caplog.text
    ruled = [dataclasses.replace(q, rule=answer_rule(same_length)) for q in questions]
    QuestionData(ruled, ruled).setup("fit")
    assert "Set data.answers" not in caplog.text


# -------------------------------------------------------------------------- finding an answer


class Bare(AnswerRule):
    """A rule of a package that looks for an answer without its brackets, which may be nothing."""

    seeks = True

    def read(self, text):
        return text.strip("()") or None

    def occurs_in(self, text, accepted):
        return accepted.strip("()") in text


@pytest.mark.parametrize(
    ("question", "text", "findable"),
    [
        (asking("Peru"), "Cusco is in Peru.", True),
        (asking("no"), "There is no such place.", False),
        (asking("Yes."), "Yes, it is.", False),
        (asking("Radio City", text="Which is older, Radio City or Ashoka?"), "Radio City", False),
        (
            asking("Radio City (India)", "Radio City", text="Radio City or Ashoka?"),
            "Radio City",
            False,
        ),
        (asking("art", text="Which party?"), "art", True),  # whole words
        (asking("42", rule=Number(), text="What is 6 x 7?"), "It is 42.0", True),
        (asking("7", rule=Number(), text="The greater of 6 and 7.0?"), "It is 7", False),
        (asking("B", rule=Choice()), "B) Paris", False),
        (Question("q", "Known to nobody?"), "anything", False),
        (asking("The", text="Which?"), "The end.", False),  # says nothing by its rule
        (asking("five", rule=Number(), text="Which?"), "five, 5", False),
        (asking("1000", rule=Number(), text="Which?"), "1,000 people", True),
        (Question("q", "Which?", ("((", "z"), rule=Bare()), "z", True),
        (Question("q", "Which?", ("((",), rule=Bare()), "z", False),
        (asking("Sa\u0303o Tome\u0301", text="Which?"), "S\u00e3o Tom\u00e9 is an island.", True),
    ],
)
def test_nothing_is_paid_if_finding_the_answer_proves_nothing(question, text, findable):
    assert is_searchable(question) == findable
    searched = attempt(question, search(text))
    assert AnswerRetrieved().score(searched, 0) == (0.5 if findable else 0)
    assert FirstHit().score(searched, 0) == (0.5 if findable else 0)
    assert compute_curves(searched)["answer_in_results"] == (1.0 if findable else None)
    assert answer_in_results(searched.results, question) == findable
    assert not answer_in_results(search(text, ok=False).results, question)


def test_a_number_is_matched_by_value_not_as_text():
    question = asking("1000", rule=Number())
    assert contains_answer("In all 1,000.0 people", question)
    assert not contains_answer("In all 10000 people, 100 of them", question)


def test_answer_in_results_counts_only_questions_whose_answer_can_be_found():
    real, verdict = asking("Peru"), asking("no")
    groups = [
        score_group([attempt(real, search("Peru")), attempt(real, search("Rome"))], [ExactMatch()]),
        score_group(
            [attempt(verdict, search("no")), attempt(verdict, search("no"))], [ExactMatch()]
        ),
    ]
    tallies = tally_groups(groups, [ExactMatch()])
    assert tallies["answer_in_results"] == Tally(1, 2)
    assert tallies["findable"] == Tally(2, 4)


# ------------------------------------------------------------------------ answers of a question


def test_a_text_counts_as_one_answer_and_other_types_are_errors():
    question = Question("q", "Where is Cusco?", "Peru")
    assert question.answers == ("Peru",)
    assert exact_match("peru", question)
    assert not exact_match("P", question)
    assert Question("q", "?", ["Peru", "Perú"]).answers == ("Peru", "Perú")
    for odd in (None, 5, 1.5, (), [], ("Peru", 5), ("Peru", None), {"Peru": 1}):
        with pytest.raises(DataError, match=r"question 'q' has the answers .*Give a text or"):
            Question("q", "?", odd)


def test_a_question_may_have_no_answers():
    unknown = Question("q", "Where?")
    assert unknown.answers == ()
    assert not exact_match("", unknown)
    assert not exact_match("Peru", unknown)
    again = dataclasses.replace(pickle.loads(pickle.dumps(unknown)), id="other")
    assert again.answers == ()


def test_numbers_of_single_precision_are_read_as_they_were_written():
    assert field_text(numpy.float32(0.1), "answer", "row 1") == "0.1"
    assert to_native(numpy.array([0.1, 2], "float32")) == [0.1, 2.0]


# ------------------------------------------------------------------------------- whole runs


def anything(given_answer, accepted):
    return True


def metrics(name="recipe"):
    with Path("runs", name, "version_0", "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_a_run_its_record_and_its_evaluation_use_the_recipes_rule(recipe, capsys):
    rule = ["--data.answers", f"{__name__}.anything"]
    assert main(["fit", "recipe.yaml", "--trainer.max_epochs", "1", *rule]) == 0
    rows = [row for row in metrics() if row["val/exact_match"]]
    assert [row["val/exact_match"] for row in rows] == [
        row["val/reward/outcome/answered"] for row in rows
    ]
    assert float(rows[0]["val/exact_match"]) > 0  # no phrase of this policy would match
    # a function finds no answer in a text, so there is no figure
    assert all(row["val/findable"] == "0.0" for row in rows)
    assert "val/answer_in_results" not in rows[0]
    kept = record.read("runs/recipe/version_0/record")
    assert [row["exact_match"] for row in kept] == [float(r["ended_by"] == "answer") for r in kept]
    assert {row["answer_in_results"] for row in kept} == {None}
    saved = Path("runs/recipe/version_0/config.yaml")
    assert f"answers: {__name__}.anything" in saved.read_text()
    capsys.readouterr()
    assert main(["eval", "runs/recipe/version_0/config.yaml"]) == 0
    printed = capsys.readouterr().out
    assert f"{float(rows[0]['val/exact_match']):.4f}" in re.search("val/exact_match .*", printed)[0]
    assert re.search(r"val/answer_in_results +-  of 0 questions, whose answer can be", printed)
