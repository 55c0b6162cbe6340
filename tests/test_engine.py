"""The in-process engine, against full forward passes over the whole history."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch
from conftest import greedy_reference

from turnrl import Policy, Sampling, TransformersEngine
from turnrl.engines.transformers import _Request

PROMPTS = [[5, 9, 33, 71, 120, 8], [44, 2, 301], [7] * 40, [250, 251, 252, 253, 254, 255, 256]]
GREEDY = Sampling(max_tokens=12, temperature=0)


def run(coroutine):
    return asyncio.run(coroutine)


async def together(*work):
    return await asyncio.gather(*work)


def test_batched_greedy_tokens_are_those_of_full_forward_passes(tiny_policy):
    engine = TransformersEngine(tiny_policy)
    sessions = [engine.open(prompt) for prompt in PROMPTS]
    completions = run(together(*(s.generate([], GREEDY) for s in sessions)))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        assert list(completion.token_ids) == greedy_reference(tiny_policy, prompt, 12)
        assert completion.reason == "length"


@pytest.mark.parametrize("slots", [1, 3, 64])
@pytest.mark.parametrize("prefill_tokens", [8, 4096])
def test_three_turns_over_kept_keys_and_values_equal_one_history(
    tiny_policy, slots, prefill_tokens
):
    engine = TransformersEngine(tiny_policy, slots=slots, prefill_tokens=prefill_tokens)

    async def converse(number: int, prompt: list[int]) -> list[int]:
        session, history = engine.open(prompt), list(prompt)
        for turn in range(3):
            # appended ids of different lengths per session and turn, so rows are ragged
            new = (
                [] if turn == 0 else [(13 * number + turn + i) % 300 for i in range(1 + 7 * number)]
            )
            count = 3 + (number + turn) % 4
            history += new
            completion = await session.generate(new, Sampling(max_tokens=count, temperature=0))
            assert list(completion.token_ids) == greedy_reference(tiny_policy, history, count)
            history += completion.token_ids
        session.close()
        return history

    histories = run(together(*(converse(i, p) for i, p in enumerate(PROMPTS))))
    assert len(histories) == len(PROMPTS)


def test_a_fork_shares_the_history_and_goes_its_own_way(tiny_policy):
    engine = TransformersEngine(tiny_policy)

    async def scenario():
        root = engine.open(PROMPTS[0])
        first = await root.generate([], Sampling(max_tokens=4, temperature=0))
        branch = root.fork()
        a, b = await together(root.generate([11, 12], GREEDY), branch.generate([99], GREEDY))
        return first, a, b

    first, a, b = run(scenario())
    history = PROMPTS[0] + list(first.token_ids)
    assert list(a.token_ids) == greedy_reference(tiny_policy, [*history, 11, 12], 12)
    assert list(b.token_ids) == greedy_reference(tiny_policy, [*history, 99], 12)


def test_a_group_reads_its_prompt_once(tiny_policy, monkeypatch):
    engine = TransformersEngine(tiny_policy)
    read = []
    forward = engine._forward
    monkeypatch.setattr(
        engine,
        "_forward",
        lambda feeds, *rest: read.append(sum(map(len, feeds))) or forward(feeds, *rest),
    )

    async def scenario():
        root = engine.open(PROMPTS[2])
        members = [root.fork() for _ in range(8)]
        return await together(
            *(m.generate([], Sampling(max_tokens=1, seed=i)) for i, m in enumerate(members))
        )

    run(scenario())
    # 40 prompt tokens: 39 read once for all, the last once per member
    assert read == [39, 8]


def test_samples_depend_on_their_seed_and_not_on_their_company(tiny_policy):
    sampling = [Sampling(max_tokens=10, temperature=1.3, seed=100 + i) for i in range(4)]

    async def sample(which: list[int]):
        engine = TransformersEngine(tiny_policy)
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
    engine = TransformersEngine(tiny_policy, slots=4096)

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


def test_log_probabilities_are_those_of_the_training_pass(tiny_policy):
    engine = TransformersEngine(tiny_policy)
    temperature = 0.7
    session = engine.open(PROMPTS[3])
    completion = run(session.generate([], Sampling(20, temperature, seed=3)))
    ids = torch.tensor([PROMPTS[3] + list(completion.token_ids)])
    mask = torch.zeros_like(ids, dtype=torch.bool)
    mask[0, len(PROMPTS[3]) :] = True
    with torch.no_grad():
        logprobs, _ = tiny_policy.logprobs(ids, torch.ones_like(ids), mask, temperature)
    assert torch.allclose(logprobs, torch.tensor(completion.logprobs), atol=1e-4)


def test_a_turn_ends_at_an_end_token_and_at_a_stop_string(tiny_policy):
    engine = TransformersEngine(tiny_policy)
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
    tokenizer = tiny_policy.tokenizer
    engine = TransformersEngine(tiny_policy)
    for stop in ("\n", " ", "。"):
        ids = tokenizer(f"a{stop}", add_special_tokens=False)["input_ids"]
        request = _Request(0, None, [], Sampling(99, stop=("###", stop)), None, None)
        request.token_ids = list(ids)
        assert engine._ending(request) == "stop", stop
        request.token_ids = ids[:-1]
        assert engine._ending(request) is None, stop


def test_turns_asked_for_at_any_moment_all_end(tiny_policy):
    # callers that do not wait for each other, as without lockstep, while others are sampled
    engine = TransformersEngine(tiny_policy, slots=5)

    async def chatter(number: int) -> int:
        session = engine.open(PROMPTS[number % 4])
        for turn in range(6):
            await asyncio.sleep(0.0007 * ((number * 7 + turn * 3) % 5))
            await session.generate(
                [number % 50 + 1], Sampling(1 + (number + turn) % 3, seed=number)
            )
        session.close()
        return number

    async def scenario():
        return await asyncio.wait_for(together(*(chatter(n) for n in range(24))), 60)

    assert run(scenario()) == list(range(24))


def test_draining_waits_for_turns_that_were_cancelled(tiny_policy):
    engine = TransformersEngine(tiny_policy)

    async def scenario():
        session = engine.open(PROMPTS[0])
        task = asyncio.create_task(session.generate([], Sampling(10_000)))
        await asyncio.sleep(0.05)
        task.cancel()
        await engine.drain()
        return engine._slots_in_use, engine._waiting, engine._server.done()

    assert run(scenario()) == ([], [], True)


def test_training_mode_is_left_as_it_was_and_does_not_change_samples(tiny_model):
    policy = Policy(str(tiny_model), gradient_checkpointing=True)
    network = policy.load()
    network.train()
    completion = run(TransformersEngine(policy).open(PROMPTS[0]).generate([], GREEDY))
    assert network.training
    network.eval()
    assert list(completion.token_ids) == greedy_reference(policy, PROMPTS[0], 12)


def test_a_failure_inside_the_model_reaches_every_caller(tiny_policy, monkeypatch):
    engine = TransformersEngine(tiny_policy)

    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine, "_forward", broken)

    async def scenario():
        sessions = [engine.open(p) for p in PROMPTS]
        return await asyncio.gather(
            *(s.generate([], GREEDY) for s in sessions), return_exceptions=True
        )

    assert [str(e) for e in run(scenario())] == ["out of memory"] * 4


def test_misuse_is_an_error(tiny_policy):
    engine = TransformersEngine(tiny_policy)
    with pytest.raises(ValueError, match="at least one token"):
        engine.open([])
    session = engine.open([1])
    session.close()
    with pytest.raises(RuntimeError, match="none after close"):
        run(session.generate([], GREEDY))
