"""Turns and sessions of the in-process engine, against full forward passes over the whole history:
batches, forks, and how turns and engines end."""

from __future__ import annotations

import asyncio

import pytest
import torch

from conftest import greedy_reference
from engines import GREEDY, PROMPTS, Watched, raises, run, started, together
from turnrl import Policy, RecipeError, Sampling
from turnrl_slots import Slots


@pytest.mark.parametrize("slots", [1, 3, 64])
@pytest.mark.parametrize("prefill_tokens", [8, 4096])
def test_three_turns_over_cached_keys_and_values_match_one_history(
    tiny_policy, slots, prefill_tokens
):
    engine = started(tiny_policy, slots=slots, prefill_tokens=prefill_tokens)

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
    engine = started(tiny_policy)

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


def test_turns_asked_for_at_any_moment_all_end(tiny_policy):
    # callers that do not wait for each other, as without lockstep, while others are sampled
    engine = started(tiny_policy, slots=5)

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
    policy = Watched(tiny_policy)
    engine = started(policy)

    async def scenario():
        session = engine.open(PROMPTS[0])
        policy.read.clear()
        task = asyncio.create_task(session.generate([], Sampling(10_000)))
        while not policy.read:
            await asyncio.sleep(0.001)
        task.cancel()
        await engine.drain()
        read = len(policy.read)
        await asyncio.sleep(0.05)  # a token takes some milliseconds
        return task.cancelled(), len(policy.read) - read

    assert run(scenario()) == (True, 0)


def test_training_mode_is_left_as_it_was_and_does_not_change_samples(tiny_model):
    policy = Policy(str(tiny_model), gradient_checkpointing=True).build()
    network = policy.load()
    network.train()
    engine = started(policy)
    assert network.training

    async def collection():
        completion = await engine.open(PROMPTS[0]).generate([], GREEDY)
        assert not network.training  # until all turns of a collection are done
        await engine.drain()
        return completion

    completion = run(collection())
    assert network.training
    network.eval()
    assert list(completion.token_ids) == greedy_reference(policy, PROMPTS[0], 12)


def test_a_failure_inside_the_model_reaches_every_caller(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy)
    policy.hidden = raises

    async def scenario():
        sessions = [engine.open(p) for p in PROMPTS]
        return await asyncio.gather(
            *(s.generate([], GREEDY) for s in sessions), return_exceptions=True
        )

    assert [str(e) for e in run(scenario())] == ["out of memory"] * 4


def test_misuse_is_an_error(tiny_policy):
    engine = started(tiny_policy)
    with pytest.raises(ValueError, match="at least one token"):
        engine.open([])
    session = engine.open([1])
    session.close()
    with pytest.raises(RuntimeError, match="none after close"):
        run(session.generate([], GREEDY))
    with pytest.raises(ValueError, match="max_tokens is 0"):
        run(engine.open([1]).generate([], Sampling(0)))
    for option in ("slots", "prefill_tokens"):
        with pytest.raises(RecipeError, match=rf"{option} (is )?0\b.* must be at least 1"):
            Slots(**{option: 0})


def test_an_engine_that_is_closed_while_it_samples_says_so_and_leaves_the_mode(tiny_model):
    policy = Watched(Policy(str(tiny_model)).build())
    engine = started(policy, 256)
    policy.read.clear()

    async def scenario():
        turns = [
            asyncio.create_task(engine.open(p).generate([], Sampling(200, seed=1))) for p in PROMPTS
        ]
        while not policy.read:
            await asyncio.sleep(0.001)
        engine.close()
        for error in await asyncio.gather(*turns, return_exceptions=True):
            assert "was closed while turns were being sampled" in str(error)
        await engine.drain()

    run(scenario())
    assert policy.load().training
    assert engine.pool.available == engine.pool.count
    engine.start(policy, 64)
    assert run(engine.open(PROMPTS[0]).generate([], Sampling(3, seed=1))).reason == "length"


def test_an_engine_that_is_closed_in_its_last_pass_gives_everything_back(tiny_model):
    policy = Watched(Policy(str(tiny_model)).build())
    engine = started(policy)
    computing, go_on = policy.hold()

    async def scenario():
        turn = asyncio.create_task(engine.open(PROMPTS[0]).generate([], Sampling(1, 0)))
        await asyncio.to_thread(computing.wait, 10)
        engine.close()
        go_on.set()
        await turn
        await asyncio.sleep(0.1)

    run(scenario())
    assert policy.load().training
    assert engine.pool.available == engine.pool.count


def test_a_drain_that_is_cancelled_leaves_the_turns_alone(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        turn = asyncio.create_task(engine.open(PROMPTS[0]).generate([], GREEDY))
        await asyncio.sleep(0)  # it has asked, and nobody has begun
        drain = asyncio.create_task(engine.drain())
        await asyncio.sleep(0)
        drain.cancel()
        completion = await asyncio.wait_for(turn, 10)
        await engine.drain()
        engine.sync(1)
        return completion

    assert list(run(scenario()).token_ids) == greedy_reference(tiny_policy, PROMPTS[0], 12)


def test_a_waiting_caller_gets_an_error_when_the_loop_is_stopped(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        turn = asyncio.create_task(engine.open(PROMPTS[0]).generate([], GREEDY))
        for _ in range(2):  # it has asked, and the engine has begun
            await asyncio.sleep(0)
        for task in asyncio.all_tasks() - {turn, asyncio.current_task()}:
            task.cancel()
        with pytest.raises(RuntimeError, match="sampling was interrupted"):
            await turn
        await engine.drain()
        engine.sync(1)

    run(scenario())


def test_weights_do_not_change_under_a_turn(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        turn = asyncio.create_task(engine.open(PROMPTS[0]).generate([], GREEDY))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"drain\(\) comes before sync"):
            engine.sync(1)
        await turn
        await engine.drain()
        engine.sync(1)

    run(scenario())


def test_a_small_model_runs_on_one_thread_and_the_thread_count_is_restored(tiny_policy):
    policy, seen, before = Watched(tiny_policy), [], torch.get_num_threads()
    engine, logits = started(policy), policy.logits
    policy.logits = lambda hidden: (seen.append(torch.get_num_threads()), logits(hidden))[1]
    try:
        torch.set_num_threads(2)
        run(engine.open(PROMPTS[0]).generate([], GREEDY))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1] * 12


def test_a_cancelled_turn_leaves_its_session_unusable_and_the_engine_as_it_was(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy)

    async def scenario():
        session = engine.open(PROMPTS[0])
        first = await session.generate([], GREEDY)
        other = engine.open(PROMPTS[1])
        policy.read.clear()
        task = asyncio.create_task(session.generate([11, 12], Sampling(500, 0)))
        beside = asyncio.create_task(other.generate([], GREEDY))
        while len(policy.read) < 5:  # in the midst of it
            await asyncio.sleep(0.001)
        task.cancel()
        completion = await beside
        assert task.cancelled()
        # what was sampled of the turn is lost, so the history has a hole
        for use in (lambda: session.generate([], GREEDY), lambda: session.generate([11], GREEDY)):
            with pytest.raises(
                RuntimeError, match="none after close\\(\\) or a turn that was canc"
            ):
                await use()
        with pytest.raises(RuntimeError, match="cancelled"):
            session.fork()
        session.close()
        anew = engine.open([*PROMPTS[0], *first.token_ids])
        return first, completion, await anew.generate([11, 12], GREEDY)

    first, beside, anew = run(scenario())
    assert list(beside.token_ids) == greedy_reference(tiny_policy, PROMPTS[1], 12)
    history = [*PROMPTS[0], *first.token_ids, 11, 12]
    assert list(anew.token_ids) == greedy_reference(tiny_policy, history, 12)


def test_a_session_generates_one_turn_at_a_time(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        session = engine.open(PROMPTS[0])
        return await asyncio.gather(
            session.generate([], GREEDY), session.generate([], GREEDY), return_exceptions=True
        )

    completion, refused = run(scenario())
    assert list(completion.token_ids) == greedy_reference(tiny_policy, PROMPTS[0], 12)
    assert "one turn at a time" in str(refused)
