"""Draws of the engine: seeds, distributions whole and cut, log-probabilities, and ends of turns."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from conftest import greedy_reference
from engines import PIECES, PROMPTS, Watched, falling_back, run, started, together
from turnrl import Policy, Sampling
from turnrl_slots import Slots

__all__ = ["falling_back"]  # a fixture


def test_samples_depend_on_their_seed_and_not_on_their_company(tiny_policy):
    sampling = [Sampling(max_tokens=10, temperature=1.3, seed=100 + i) for i in range(4)]

    async def sample(which: list[int]):
        engine = started(tiny_policy)
        sessions = [engine.open(PROMPTS[i]) for i in which]
        return await together(
            *(s.generate([], sampling[i]) for s, i in zip(sessions, which, strict=True))
        )

    all_at_once = run(sample([0, 1, 2, 3]))
    alone = [run(sample([i]))[0] for i in range(4)]
    assert [c.token_ids for c in all_at_once] == [c.token_ids for c in alone]
    assert len({c.token_ids for c in all_at_once}) == 4


def test_samples_follow_the_distribution_of_the_model(tiny_policy):
    # frequencies of the first token over 4,000 draws against softmax(logits / T); the standard
    # error of a frequency p is sqrt(p (1 - p) / 4000) <= 0.008, and 5 of them are allowed
    temperature, draws = 2.0, 4000
    with torch.no_grad():
        logits = tiny_policy.load()(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1]
    expected = (logits / temperature).softmax(-1)
    engine = started(tiny_policy, slots=4096)

    async def scenario():
        root = engine.open(PROMPTS[1])
        forks = [root.fork() for _ in range(draws)]
        return await together(
            *(f.generate([], Sampling(1, temperature, seed=i)) for i, f in enumerate(forks))
        )

    completions = run(scenario())
    counts = torch.bincount(
        torch.tensor([c.token_ids[0] for c in completions]), minlength=len(expected)
    )
    error = (expected * (1 - expected) / draws).sqrt() + 1e-4
    assert ((counts / draws - expected).abs() <= 5 * error).all()
    token = completions[0].token_ids[0]
    assert completions[0].logprobs[0] == pytest.approx(math.log(expected[token]), abs=1e-5)


def test_sampled_log_probabilities_match_the_training_pass(tiny_policy):
    engine = started(tiny_policy)
    temperature = 0.7
    session = engine.open(PROMPTS[3])
    completion = run(session.generate([], Sampling(20, temperature, seed=3)))
    sampled = list(completion.token_ids)
    row = (PROMPTS[3] + sampled, [False] * len(PROMPTS[3]) + [True] * len(sampled))
    ((logprobs, *_),) = tiny_policy.score_tokens([row], 100, temperature)
    assert torch.allclose(logprobs, torch.tensor(completion.logprobs), atol=1e-4)


def test_a_turn_ends_at_an_end_token_and_at_a_stop_string(tiny_policy):
    engine = started(tiny_policy)
    tokens = greedy_reference(tiny_policy, PROMPTS[0], 12)
    end = next(t for i, t in enumerate(tokens) if i > 3 and t not in tokens[:i])
    count = tokens.index(end) + 1
    ended = run(engine.open(PROMPTS[0]).generate([], Sampling(12, 0, end_ids=(end,))))
    assert list(ended.token_ids) == tokens[:count]
    assert ended.reason == "end"
    text = tiny_policy.tokenizer.decode(tokens[:count])
    stopped = run(engine.open(PROMPTS[0]).generate([], Sampling(12, 0, stop=("no such", text[-1]))))
    shortest = next(n for n in range(1, 13) if text[-1] in tiny_policy.tokenizer.decode(tokens[:n]))
    assert list(stopped.token_ids) == tokens[:shortest]
    assert stopped.reason == "stop"


def test_a_stop_string_may_be_white_space_or_beyond_ascii(tiny_policy):
    for stop in ("\n", " ", "。"):
        ids = tiny_policy.tokenizer(f"a{stop}bc", add_special_tokens=False)["input_ids"]
        next_ids = iter(ids)
        policy = Watched(tiny_policy)
        engine = started(policy)
        policy.logits = lambda hidden, next_ids=next_ids: torch.full((1, 351), -1e4).index_fill(
            1, torch.tensor(next(next_ids)), 0.0
        )
        turn = run(engine.open([5]).generate([], Sampling(99, 0, stop=("###", stop))))
        assert turn.reason == "stop"
        assert tiny_policy.tokenizer.decode(turn.token_ids) == f"a{stop}"


STOPS = ("}", "x}", "}}", " }", "}a", "é", "é}", "\u3002", "x \u3002", " END", " x")


def test_a_stop_string_ends_a_turn_however_it_is_tokenized(falling_back):
    # pieces, and the bytes of what is not in the vocabulary: `}`, `é`, an ideographic full stop
    tokenizer = falling_back.tokenizer
    of_bytes = [3 + byte for byte in "}\u00e9\u3002x a".encode()]
    alphabet, draw = [*range(259, 259 + len(PIECES)), *of_bytes], random.Random(0)
    written = [tokenizer(f"a x{stop}a", add_special_tokens=False)["input_ids"] for stop in STOPS]
    sequences = [*written, *(draw.choices(alphabet, k=16) for _ in range(300))]
    stops = [(stop,) for stop in STOPS] + [tuple(draw.sample(STOPS, 2)) for _ in range(300)]
    engine = started(falling_back)

    async def sample():
        sampled = (
            engine.open([5]).generate([], Sampling(len(ids), 0, stop=stop, forced_ids=tuple(ids)))
            for ids, stop in zip(sequences, stops, strict=True)
        )
        return await together(*sampled)

    reasons = []
    for turn, ids, stop in zip(run(sample()), sequences, stops, strict=True):
        texts = [tokenizer.decode(ids[: n + 1]) for n in range(len(ids))]
        ends = (n for n, text in enumerate(texts, 1) if any(end in text for end in stop))
        count = next(ends, None)
        assert list(turn.token_ids) == ids[:count], (texts[-1], stop)
        assert turn.reason == ("length" if count is None else "stop")
        reasons.append(turn.reason)
    assert reasons[: len(STOPS)] == ["stop"] * len(STOPS)
    assert 60 < reasons.count("length") < 250


def test_a_restarted_engine_knows_the_stop_strings_of_its_new_tokenizer(tiny_policy):
    engine, stop = Slots().build(), Sampling(12, 0, stop=("r",))
    engine.close()  # harmless before a start
    other = Watched(tiny_policy)
    other.tokenizer = Policy("package://turnrl_atlas/starter").build().tokenizer
    tokens = greedy_reference(tiny_policy, PROMPTS[0], 12)
    # the second token is "ar", and nothing with an r in the other vocabulary
    assert "r" in tiny_policy.tokenizer.decode(tokens[1])
    assert "r" not in other.tokenizer.decode(tokens[1])
    engine.start(other, 64)
    run(engine.open(PROMPTS[0]).generate([], stop))
    engine.start(tiny_policy, 64)
    turn = run(engine.open(PROMPTS[0]).generate([], stop))
    assert (turn.reason, list(turn.token_ids)) == ("stop", tokens[:2])


def test_forced_tokens_are_taken_and_have_the_models_log_probabilities(tiny_policy):
    free = Sampling(6, seed=3)
    drawn = run(started(tiny_policy).open(PROMPTS[0]).generate([], free))
    # the first three are another sample's, the rest goes on from there by its own draws
    forced = replace(Sampling(6, seed=4), forced_ids=drawn.token_ids[:3])
    turn = run(started(tiny_policy).open(PROMPTS[0]).generate([], forced))
    assert turn.token_ids[:3] == drawn.token_ids[:3]
    assert turn.token_ids != drawn.token_ids
    assert turn.logprobs[:3] == pytest.approx(drawn.logprobs[:3], abs=1e-6)
    forced = replace(forced, forced_ids=drawn.token_ids)
    turn = run(started(tiny_policy).open(PROMPTS[0]).generate([], forced))
    assert turn.token_ids == drawn.token_ids
    assert turn.reason == "length"
