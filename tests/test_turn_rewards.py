"""What turns earn without a judge: numbers by hand, second implementations, a real tiny policy."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runs import column, data, make_module, trainer
from trajectories import again, ids_of, observed, sampled_turn, trajectory, with_turns
from turnrl import (
    Policy,
    Question,
    Reading,
    RecipeError,
    Rollout,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    exact_match,
    score_group,
)
from turnrl.policy.model import LanguageModel
from turnrl.policy.settings import Lora
from turnrl.rewards.scoring import compute_curves
from turnrl.testing import check_reward
from turnrl_rewards import (
    F1,
    AnswerLikelihood,
    AnswerRetrieved,
    AnswerSeen,
    FirstHit,
    InformationGain,
    KLPenalty,
    Number,
    Progress,
    Repetition,
    SearchCost,
    StateScore,
    SupportSeen,
)
from worlds import Echo, Letters

ROOT = Path(__file__).parents[1]
PARIS = Question("q", "The capital of France?", ("Paris", "City of Light"))


def call(query="france", name="search", **arguments) -> ToolCall:
    return ToolCall(name, {"query": query, **arguments})


UNREADABLE = ToolCall("", error="bad JSON")


def turn(*calls, results=(), answer=None) -> Turn:
    return sampled_turn("text", (7, 8), (-0.5, -0.25), Reading(calls, answer), results, (5,))


def attempt(*turns, of=PARIS) -> Trajectory:
    return trajectory(of, (1, 2, 3), turns, "answer" if turns[-1].reading.answer else "turns")


def earned(reward, trajectory) -> list[float]:
    return [reward.score(trajectory, k) for k in range(len(trajectory.turns))]


def page(text, *ids, ok=True) -> ToolResult:
    return ToolResult(text, ok, {"passage_ids": list(ids)})


# --------------------------------------------------------------------------- what calls cost


def test_each_search_costs_more_than_the_one_before_it():
    three = attempt(turn(call("a")), turn(call("b")), turn(call("c")), turn(answer="Paris"))
    # -0.1 x 1, -0.1 x 2, -0.1 x 3; the turn that answers calls nothing
    assert earned(SearchCost(), three) == pytest.approx([-0.1, -0.2, -0.3, 0])
    # and n of them cost 0.1 x 3 x 4 / 2
    assert sum(earned(SearchCost(), three)) == pytest.approx(-0.6)


def test_failed_unreadable_and_unrun_calls_cost_as_much_as_others():
    failed = turn(call("a"), results=[ToolResult("no such tool", ok=False)])
    attempts = attempt(failed, turn(UNREADABLE, call("b")), turn(), turn(call("c")))
    # 1 call so far, then 1 + 2, then none in this turn, then 4
    assert earned(SearchCost(0.5), attempts) == [-0.5, -1.5, 0, -2]


def test_a_repeated_call_costs_in_whichever_turn_it_repeats():
    four = attempt(
        turn(call("France"), call("  france\n")),  # the second repeats the first
        turn(call("FRANCE"), call("Spain"), call("Spain")),  # the first, and the last
        turn(call("Spain", name="look")),  # another tool
        turn(call("Spain", page=2), call("Spain", page=2)),  # other arguments, twice
    )
    assert earned(Repetition(), four) == pytest.approx([-0.2, -0.4, 0, -0.2])


@pytest.mark.parametrize("query", [
    "UTRECHT", " utrecht\n", "Ut\u200brecht", "U\u0301trecht", "\uff35trecht", "Utr\u0435\u0441ht",
    "(Utrecht)", "Utrecht?!", "Utrecht -", "\u3164Utrecht", "__Utrecht",
])  # fmt: skip
def test_a_repetition_is_one_however_it_is_spelt(query):
    assert earned(Repetition(), attempt(turn(call("Utrecht")), turn(call(query)))) == [0, -0.2]


def test_calls_that_differ_only_in_case_and_white_space_are_the_same():
    differ = [call("1+2"), call("12"), call("the who"), call("who"), call("1 2"), call(12)]
    differ += [call(text) for text in ("1-2", "1.2", "f(1)-2", "f(1)+2", "a<b", "a>b", "東京")]
    differ += [call(text) for text in ("Москва", "Минск", "京都", "x", "y")]
    assert earned(Repetition(), attempt(turn(*differ))) == [0]
    nested = [ToolCall("f", {"a": {"x": ["A b", 1], "y": 2}}), ToolCall("f", {"a": {}})]
    again = ToolCall("f", {"a": {"y": 2, "x": ["a  B", 1]}})
    assert earned(Repetition(), attempt(turn(*nested), turn(again))) == [0, -0.2]


def test_unreadable_calls_are_not_repetitions():
    assert earned(Repetition(), attempt(turn(UNREADABLE, UNREADABLE), turn(UNREADABLE))) == [0, 0]


# ------------------------------------------------------------------------- progress


SEARCHED = [
    turn(call("x"), results=[page("Lyon is a city.", "p1")]),
    turn(call("y"), results=[page("Paris was not found", "p2", ok=False)]),
    turn(call("z"), results=[page("Paris it is.", "p2", "p9")]),
    turn(call("z"), results=[page("Paris it is.", "p2", "p9")]),
    turn(answer="Paris"),
]


def test_the_turn_that_first_finds_the_answer_earns_once():
    assert earned(FirstHit(), attempt(*SEARCHED)) == [0, 0, 0.5, 0, 0]
    assert earned(Progress(AnswerSeen(), 0.5), attempt(*SEARCHED)) == [0, 0, 0.5, 0, 0]


def test_words_of_a_call_are_nothing_found():
    echo, plain = page("nothing about Paris"), page("Paris it is.")
    last = turn(answer="Rome")
    asked = call("Paris")
    for turns, found in [
        ([turn(asked, results=[echo])], []),
        (
            [
                turn(call("note paris!"), results=[page("noted")]),
                turn(call("notes"), results=[echo]),
            ],
            [],
        ),
        ([turn(call("x", list=[{"a": "PARIS"}]), results=[echo])], []),
        ([turn(call("x", filter={"Paris": [1]}), results=[echo])], []),
        ([turn(call("x"), asked, results=[plain, echo])], []),
        ([turn(call("x"), results=[plain]), turn(asked, results=[echo])], [0]),
        (
            [turn(asked, results=[page("City of Light, once Paris")])],
            [0],
        ),  # another accepted answer
        ([turn(call("par", more="is"), results=[plain])], [0]),
        ([turn(call("Parisian"), results=[plain])], [0]),
    ]:
        whole = attempt(*turns, last)
        pays = [0.5 * (k in found) for k in range(len(turns) + 1)]
        assert earned(AnswerRetrieved(), whole) == pays
        assert earned(FirstHit(), whole) == pays
        assert earned(Progress(AnswerSeen(), 0.5), whole) == pays
        assert compute_curves(whole)["answer_in_results"] == float(bool(found))
    number = Question("n", "How many?", ("12",), rule=Number())
    result = [ToolResult("12")]
    for query, pay in [("5 + 7", 0.5), (12, 0.0), ("120", 0.5)]:
        whole = attempt(turn(call(query), results=result), last, of=number)
        assert earned(AnswerRetrieved(), whole) == [pay, 0]


def test_progress_is_the_share_of_supporting_passages_that_a_turn_adds():
    two = Question("q", "?", ("Paris",), {"supporting_ids": ["p1", "p2"], "passage_id": "p9"})
    # p1 is half of them; p2 in a failed result is nothing; then the other half, and once
    assert earned(Progress(SupportSeen()), attempt(*SEARCHED, of=two)) == [0.5, 0, 0.5, 0, 0]
    by_field = Progress(SupportSeen("passage_id"), 3.0)
    assert earned(by_field, attempt(*SEARCHED, of=two)) == [0, 0, 3, 0, 0]
    assert earned(Progress(SupportSeen()), attempt(*SEARCHED)) == [0] * 5  # it names none


class Table(StateScore):
    """A score with fixed values."""

    def __init__(self, values):
        self.values = values

    def score(self, trajectory, turns):
        return self.values[turns]


@given(st.lists(st.floats(-9, 9), min_size=2, max_size=6), st.floats(-2, 2))
def test_progress_sums_to_the_last_score_minus_the_first(values, weight):
    walked = attempt(*[turn(call())] * (len(values) - 1))
    rewards = earned(Progress(Table(values), weight), walked)
    naive = [weight * values[k + 1] - weight * values[k] for k in range(len(values) - 1)]
    assert rewards == pytest.approx(naive)
    assert sum(rewards) == pytest.approx(weight * (values[-1] - values[0]))


def test_the_score_in_the_readme_works():
    readme = ROOT / "plugins" / "turnrl-rewards" / "README.md"
    block, _ = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)
    names = {}
    exec(block, names)
    # one passage, one in a result that failed, two, and the same two
    assert earned(Progress(names["PassagesSeen"](), 2.0), attempt(*SEARCHED)) == [2, 0, 4, 0, 0]


# ------------------------------------------------------------------------------- F1


def naive_f1(answer: str, accepted: str) -> float:
    """SQuAD's, word by word."""

    def words(text):
        text = re.sub(r"[^\w\s]|_", "", text.lower())
        return [word for word in text.split() if word not in ("a", "an", "the")]

    left, shared = words(accepted), 0
    for word in words(answer):
        if word in left:
            left.remove(word)
            shared += 1
    if not shared:
        return 0.0
    precision, recall = shared / len(words(answer)), shared / len(words(accepted))
    return 2 * precision * recall / (precision + recall)


WORDS = st.sampled_from(["new", "york", "New", "the", "a", "city", "York!", "-", "paris,"])
TEXTS = st.lists(WORDS, max_size=5).map(" ".join)


@given(TEXTS, st.lists(TEXTS, min_size=1, max_size=3))
def test_f1_equals_squads(given_answer, accepted):
    answered = attempt(turn(answer=given_answer or None), of=Question("q", "?", tuple(accepted)))
    wanted = max((naive_f1(given_answer, text) for text in accepted), default=0.0)
    assert F1().score(answered) == pytest.approx(wanted)
    hit = exact_match(given_answer, answered.question)
    assert not hit or F1(2.0).score(answered) == pytest.approx(2.0)


# ------------------------------------------------------------------------------- a policy


class Long(Letters):
    """Up to four turns; few of them answer."""

    max_turns = 4

    def read(self, text, turn, cut):
        return super().read(text if "k" in text else "", turn, cut)


@pytest.fixture(scope="module")
def played(tiny_model):
    """Four attempts at each of two questions by a real tiny policy, of one to four turns."""
    module = make_module(tiny_model)
    module.rollout = Rollout(Long(), [Echo()], max_turn_tokens=6, max_tokens=200)
    asked = [Question("a", "Number 1?", ("", "12 letters")), Question("b", "Two?", ("two",))]
    attempts = module.ask(asked, samples=4)
    assert max(len(t.turns) for t in attempts) == 4
    return attempts


@pytest.fixture(scope="module")
def adapted(tiny_model):
    """A policy whose adapter does something."""
    torch.manual_seed(1)  # of both halves: peft draws one of them while it loads
    policy = Policy(str(tiny_model), lora=Lora(r=4)).build()
    policy.load()
    for name, parameter in policy.network.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return policy


def plain_logprobs(policy, ids) -> list[float]:
    """Of each token but the first, by one plain forward pass."""
    with torch.no_grad():
        logits = policy.load()(input_ids=torch.tensor([ids])).logits[0].float()
    log_p = torch.log_softmax(logits, -1)
    return [float(log_p[i - 1, ids[i]]) for i in range(1, len(ids))]


def naive_phi(policy, whole, turns, opening="<answer>") -> float:
    ids, read = list(whole.sample.prompt_ids), list(whole.sample.prompt_ids)
    for k, taken in enumerate(whole.turns[:turns]):
        ids += [*ids_of(whole, k), *observed(whole, k)]
        if any(result.ok for result in taken.results):
            read = list(ids)
    answer = next(a for a in whole.question.answers if a)
    put = policy.tokenizer(opening + answer, return_offsets_mapping=True)
    counted = sum(end > len(opening) for _, end in put["offset_mapping"])
    return sum(plain_logprobs(policy, read + put["input_ids"])[-counted:])


def test_information_gain_is_the_change_in_the_answers_log_probability(
    tiny_policy, played, monkeypatch
):
    monkeypatch.setattr(
        tiny_policy, "settings", replace(tiny_policy.settings, minibatch_tokens=300)
    )
    reward = InformationGain(2.0)
    reward.prepare(played, tiny_policy)
    gains = set()
    for whole in played:
        phi = [naive_phi(tiny_policy, whole, n) for n in range(len(whole.turns) + 1)]
        rewards = earned(reward, whole)
        wanted = [2.0 * (after - before) for before, after in itertools.pairwise(phi)]
        assert rewards == pytest.approx(wanted, abs=1e-3)
        assert sum(rewards) == pytest.approx(2.0 * (phi[-1] - phi[0]), abs=1e-3)
        gains.update(round(value, 2) for value in rewards)
    assert len(gains) > 5


def test_a_turn_without_a_result_gains_nothing_by_itself(tiny_policy, played):
    long = next(t for t in played if len(t.turns) == 4)
    failed = (ToolResult("no", ok=False),)
    turns = (again(long, 0, results=failed, observed=(5, 6)), again(long, 1), again(long, 3))
    shortened = with_turns(long, turns)
    reward = InformationGain()
    reward.prepare([shortened], tiny_policy)
    rewards = earned(reward, shortened)
    # the last turn of a rollout has no observation
    assert [rewards[0], rewards[2]] == [0, 0]
    gain = naive_phi(tiny_policy, shortened, 2) - naive_phi(tiny_policy, shortened, 0)
    assert rewards[1] == pytest.approx(gain, abs=1e-3)
    assert gain != 0


def test_information_gain_can_be_per_token_or_a_probability(tiny_policy, played):
    first = played[0]  # whose answer has several tokens
    tokens = len(tiny_policy.tokenizer("12 letters")["input_ids"])
    assert tokens > 1
    nats = naive_phi(tiny_policy, first, 1, "the answer: ")
    wanted = {
        "logprob": nats,
        "mean_logprob": nats / tokens,
        "probability": math.exp(nats / tokens),
    }
    for measure, value in wanted.items():
        score = AnswerLikelihood("the answer: ", measure)
        score.prepare([first], tiny_policy)
        assert score.score(first, 1) == pytest.approx(value, rel=1e-3), measure


def test_an_answer_is_tokenized_as_the_policy_would_write_it(tiny_policy, played):
    asked = replace(played[0], question=Question("q", "?", ("Paris",)))
    # " Paris" is a token of its own, which neither " " nor "Paris" begins
    assert len(tiny_policy.tokenizer(" Paris")["input_ids"]) == 1
    for opening in ("I know. ", "I know.", ""):
        score = AnswerLikelihood(opening)
        score.prepare([asked], tiny_policy)
        wanted = naive_phi(tiny_policy, asked, 1, opening)
        assert score.score(asked, 1) == pytest.approx(wanted, abs=1e-3)


def test_information_gain_can_use_the_reference_policy(adapted, tiny_policy, played):
    now, before = AnswerLikelihood(), AnswerLikelihood(reference=True)
    for score in (now, before):
        score.prepare(played, adapted)
    first = played[0]
    # without its adapter it is the model that it came from
    assert before.score(first, 1) == pytest.approx(naive_phi(tiny_policy, first, 1), abs=1e-3)
    assert now.score(first, 1) == pytest.approx(naive_phi(adapted, first, 1), abs=1e-3)
    assert abs(now.score(first, 1) - before.score(first, 1)) > 0.01


def test_each_state_is_read_once_in_minibatches_within_the_budget(tiny_model, played):
    policy = Policy(str(tiny_model), minibatch_tokens=300).build()
    network, forward = policy.load(), policy.forward
    states, sizes, modes = [], [], set()

    def watched(layout, temperature):
        assert not torch.is_grad_enabled()
        sizes.append(layout.input_ids.numel())
        modes.add(network.training)
        return forward(layout, temperature)

    def read(rows, *arguments):
        states.extend(tuple(ids) for ids, _ in rows)
        return LanguageModel.score_tokens(policy, rows, *arguments)

    policy.forward, policy.score_tokens = watched, read
    network.get_decoder().layers[0].eval()  # each part must return to its own mode
    before = [part.training for part in network.modules()]
    assert set(before) == {True, False}
    InformationGain().prepare(played, policy)
    assert Counter(states).most_common(1)[0][1] == 1
    # both prompts, and a state for each turn that brought something
    results = {(t.sample.token_ids, k) for t in played for k, u in enumerate(t.turns) if u.results}
    assert 2 < len(states) <= 2 + len(results)
    assert max(sizes) <= 300
    assert len(sizes) > 1
    # and the prompts, that all others begin with, once for all that are read together
    assert sum(sizes) < 0.8 * sum(map(len, states))
    assert modes == {False}
    assert [part.training for part in network.modules()] == before
    assert all(p.grad is None for p in policy.parameters())


def test_a_question_without_an_answer_has_no_information_to_gain(tiny_policy, played):
    unknown = Question("q", "?", ("", "the"))
    attempts = [replace(t, question=unknown) for t in played]
    group = score_group(attempts, [InformationGain()], policy=tiny_policy)
    assert group.turn_rewards.abs().sum() == 0


def test_the_penalty_is_the_sum_of_log_ratios_of_a_turns_sampled_tokens(
    adapted, tiny_policy, played, monkeypatch
):
    monkeypatch.setattr(adapted, "settings", replace(adapted.settings, minibatch_tokens=300))
    reward = KLPenalty(0.5)
    reward.prepare(played, adapted)
    for whole in played:
        # of the model without an adapter; of each token but the first
        reference = [0.0, *plain_logprobs(tiny_policy, list(whole.sample.token_ids))]
        own = [0.0, *plain_logprobs(adapted, list(whole.sample.token_ids))]
        at, wanted = len(whole.sample.prompt_ids), []
        for k in range(len(whole.turns)):
            end = at + len(ids_of(whole, k))
            wanted.append(-0.5 * (sum(own[at:end]) - sum(reference[at:end])))
            at = end + len(observed(whole, k))
        assert earned(reward, whole) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize(
    "make", [lambda: SearchCost(-0.1), lambda: Repetition(-1), lambda: KLPenalty(-1.0)]
)
def test_a_negative_cost_is_refused(make):
    with pytest.raises(RecipeError, match="so it would pay instead of costing"):
        make()


def test_a_passages_field_that_no_question_has_is_refused(played):
    question = replace(played[0].question, metadata={"place": "Utrecht"})
    known = [replace(played[0], question=question)]
    with pytest.raises(RecipeError, match=r"SupportSeen\.field is 'pages', and no question has"):
        score_group(known, [Progress(SupportSeen("pages"))])
    # but where some do, others may come that do not
    support = SupportSeen("pages")
    named = replace(question, metadata={"pages": ["a"]})
    score_group([replace(played[0], question=named)], [Progress(support)])
    assert score_group(known, [Progress(support)]).turn_rewards.abs().sum() == 0


def test_a_branch_pays_no_penalty_for_shared_turns(adapted, played):
    long = next(t for t in played if len(t.turns) > 1)
    branch = replace(long, begins=1)
    reward = KLPenalty(1.0)
    reward.prepare([long, branch], adapted)
    assert (reward.score(branch, 0), reward.score(branch, 1)) == (0.0, reward.score(long, 1))
    assert reward.score(long, 0) != 0.0


@pytest.mark.parametrize("reward", [KLPenalty(1.0), InformationGain(reference=True)])
def test_a_reference_needs_an_adapter(reward, tiny_policy, played):
    with pytest.raises(RecipeError, match=r"adapter still has\. Set model\.policy\.lora"):
        score_group(played[:4], [reward], policy=tiny_policy)


@pytest.mark.parametrize("reward", [KLPenalty(1.0), InformationGain()])
def test_a_trajectory_that_was_not_prepared_with_a_policy_is_not_scored(reward, adapted, played):
    with pytest.raises(RecipeError, match="has not seen this trajectory with a policy"):
        score_group(played[:4], [reward])
    reward.prepare(played[:4], adapted)
    assert earned(reward, played[0])
    with pytest.raises(RecipeError, match="has not seen this trajectory"):
        earned(reward, played[4])


# ------------------------------------------------------------------------------- contracts


@pytest.mark.parametrize("reward", [
    *(SearchCost(), SearchCost(2.0), Repetition(), FirstHit(), FirstHit(3.0), F1(), F1(2.0)),
    *(Progress(AnswerSeen()), Progress(SupportSeen(), 7.0)),
], ids=lambda reward: type(reward).__name__)  # fmt: skip
def test_a_reward_keeps_to_the_contract(reward):
    check_reward(reward)


@pytest.mark.parametrize("reward", [
    InformationGain(), InformationGain(3.0, measure="probability"),
    InformationGain(reference=True), KLPenalty(0.1),
], ids=lambda reward: type(reward).__name__)  # fmt: skip
def test_a_reward_that_asks_the_policy_keeps_to_the_contract(reward, adapted):
    check_reward(reward, policy=adapted)


def test_garbage_that_names_the_answer_gains_nothing_from_its_error_message(tiny_policy, played):
    garbled = Reading(format_error="no call or answer")
    ids = tiny_policy.tokenizer("12 letters 12 letters")["input_ids"]
    rambling = sampled_turn("12 letters", ids, (-1.0,) * len(ids), garbled, (), (5, 6, 7))
    garbage = with_turns(played[0], (rambling,) * 3)
    group = score_group([garbage], [InformationGain()], policy=tiny_policy)
    assert group.turn_rewards.tolist() == [[0, 0, 0]]


def test_importing_the_plugin_loads_neither_torch_nor_an_http_client():
    heavy = "{'torch', 'transformers', 'httpx2', 'asyncio'}"
    code = f"import sys, turnrl_rewards; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"


# ------------------------------------------------------------------------------- training


@pytest.mark.slow
def test_a_policy_trains_on_all_turn_rewards_together(tiny_model, tmp_path):
    module = make_module(tiny_model, policy={"lora": Lora(r=4)})
    module.rewards = [
        *(SearchCost(), Repetition(), FirstHit(), Progress(SupportSeen()), F1()),
        *(InformationGain(0.1), KLPenalty(0.05)),
    ]
    trainer(tmp_path, 2).fit(module, data())
    for name in ("search_cost", "information_gain", "kl_penalty"):
        values = column(tmp_path, f"reward/turn/{name}")
        assert len(values) == 2
        assert all(map(math.isfinite, values)), name
    gained = column(tmp_path, "reward/turn/information_gain")
    assert all(value != 0 for value in gained)
    # the policy was its reference, and is not any more
    before, after = column(tmp_path, "reward/turn/kl_penalty")
    assert abs(before) < 1e-4 < abs(after)
    assert column(tmp_path, "val/reward/turn/information_gain")
