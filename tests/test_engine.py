"""The in-process engine, against full forward passes over the whole history; and the check that any
engine has to pass, against engines that are broken on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import random
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
import turnrl_slots.kernel
from turnrl_slots import Slots
from turnrl_slots.attention import Feed, Pass, Plan
from turnrl_slots.decode import Decoder, padded
from turnrl_slots.kernel import Tables
from turnrl_slots.pages import PAGE, Pool, Shapes
from turnrl_slots.sampling import truncated

from conftest import greedy_reference
from turnrl import Engine, Lora, Policy, RecipeError, Sampling, Session, parse_bytes
from turnrl.policy.layout import lay_out
from turnrl.testing import check_engine

PROMPTS = [[5, 9, 33, 71, 120, 8], [44, 2, 301], [7] * 40, [250, 251, 252, 253, 254, 255, 256]]
GREEDY = Sampling(max_tokens=12, temperature=0)


def run(coroutine):
    return asyncio.run(coroutine)


async def together(*work):
    return await asyncio.gather(*work)


def started(policy, max_tokens=64, **options):
    engine = Slots(**options)
    engine.start(policy, max_tokens)
    return engine


class Watched:
    """A policy that notes what it is given to read, as (rows, tokens), and can be tampered with."""

    def __init__(self, policy):
        self.policy, self.tokenizer, self.load = policy, policy.tokenizer, policy.load
        self.logits = policy.logits
        self.read = []

    def hidden(self, input_ids, *rest, **options):
        self.read.append(tuple(input_ids.shape))
        return self.policy.hidden(input_ids, *rest, **options)


def raises(*_, **__):
    raise RuntimeError("out of memory")


def test_batched_greedy_tokens_are_those_of_full_forward_passes(tiny_policy):
    engine = started(tiny_policy)
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


def test_a_group_reads_its_prompt_once(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy)
    policy.read.clear()

    async def scenario():
        root = engine.open(PROMPTS[2])
        members = [root.fork() for _ in range(8)]
        return await together(
            *(m.generate([], Sampling(max_tokens=1, seed=i)) for i, m in enumerate(members))
        )

    run(scenario())
    # 40 prompt tokens: the first member reads them for all, the others the last one besides
    assert policy.read == [(1, 40), (1, 7)]


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


def test_log_probabilities_are_those_of_the_training_pass(tiny_policy):
    engine = started(tiny_policy)
    temperature = 0.7
    session = engine.open(PROMPTS[3])
    completion = run(session.generate([], Sampling(20, temperature, seed=3)))
    sampled = list(completion.token_ids)
    row = (PROMPTS[3] + sampled, [False] * len(PROMPTS[3]) + [True] * len(sampled))
    ((logprobs, *_),) = tiny_policy.read([row], 100, temperature)
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


def test_forced_tokens_are_taken_and_have_the_models_log_probabilities(tiny_policy):
    free = Sampling(6, seed=3)
    drawn = run(started(tiny_policy).open(PROMPTS[0]).generate([], free))
    # the first three are another sample's, the rest goes on from there by its own draws
    forced = replace(Sampling(6, seed=4), forced_ids=drawn.token_ids[:3])
    found = run(started(tiny_policy).open(PROMPTS[0]).generate([], forced))
    assert found.token_ids[:3] == drawn.token_ids[:3]
    assert found.token_ids != drawn.token_ids
    assert found.logprobs[:3] == pytest.approx(drawn.logprobs[:3], abs=1e-6)
    forced = replace(forced, forced_ids=drawn.token_ids)
    found = run(started(tiny_policy).open(PROMPTS[0]).generate([], forced))
    assert found.token_ids == drawn.token_ids
    assert found.reason == "length"
    # of the whole distribution, though others are drawn from a part of it
    cut = replace(forced, top_k=1)
    found = run(started(tiny_policy).open(PROMPTS[0]).generate([], cut))
    assert found.logprobs == pytest.approx(drawn.logprobs, abs=1e-5)


def test_a_stop_string_may_be_white_space_or_beyond_ascii(tiny_policy):
    for stop in ("\n", " ", "。"):
        ids = tiny_policy.tokenizer(f"a{stop}bc", add_special_tokens=False)["input_ids"]
        said = iter(ids)
        policy = Watched(tiny_policy)
        engine = started(policy)
        policy.logits = lambda hidden, said=said: torch.full((1, 351), -1e4).index_fill(
            1, torch.tensor(next(said)), 0.0
        )
        found = run(engine.open([5]).generate([], Sampling(99, 0, stop=("###", stop))))
        assert found.reason == "stop"
        assert tiny_policy.tokenizer.decode(found.token_ids) == f"a{stop}"


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
    policy = Policy(str(tiny_model), gradient_checkpointing=True)
    network = policy.load()
    network.train()
    engine = started(policy)
    assert network.training

    async def collection():
        found = await engine.open(PROMPTS[0]).generate([], GREEDY)
        assert not network.training  # until all turns of a collection are done
        await engine.drain()
        return found

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


# ------------------------------------------------------------------- pages and their bound

PAGE_BYTES = 2 * 2 * 2 * 16 * 4 * PAGE
"""Of the tiny model: 2 layers, keys and values, 2 heads of 16 numbers of 4 bytes."""


@pytest.mark.parametrize("text", ["4", "4 PB", "4G", "-1GB", "all", "0GB", ""])
def test_a_memory_that_is_no_size_is_refused(text):
    with pytest.raises(RecipeError, match=r"kv_memory is '.*'; give 'auto', or a size"):
        Slots(kv_memory=text)


def test_a_memory_has_a_unit_and_auto_is_the_same_each_time(tiny_policy):
    assert parse_bytes("1.5GB", "it") == 1_500_000_000
    assert parse_bytes(" 512 MiB", "it") == 512 * 2**20
    first, second = started(tiny_policy), started(tiny_policy)
    assert first.capacity == second.capacity > 1000
    assert first.pool.bytes < 0.26 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_trajectory_that_does_not_fit_is_told_before_anything_is_sampled(tiny_policy):
    told = (
        r"kv_memory is '50KB': room for 96 tokens of 512 bytes each.*max_tokens = 100 takes 0\.1 MB"
    )
    with pytest.raises(RecipeError, match=told):
        started(tiny_policy, 100, kv_memory="50KB")
    engine = started(tiny_policy, 96, kv_memory="50KB")
    assert engine.capacity == 1
    with pytest.raises(ValueError, match=r"40 tokens and a turn of 99 do not fit.*50KB"):
        run(engine.open(PROMPTS[2]).generate([], Sampling(99)))


@pytest.mark.parametrize("slots", [2, 64])
def test_more_sessions_than_fit_are_served_within_the_memory_by_reading_again(tiny_policy, slots):
    policy = Watched(tiny_policy)

    def texts(kv_memory):
        engine = started(policy, 100, kv_memory=kv_memory, slots=slots)
        policy.read.clear()
        assert kv_memory == "auto" or engine.capacity == 2  # of four pages each

        async def converse(n):
            session = engine.open([n + 1] * 20)
            said = []
            for turn in range(3):
                found = await session.generate([n] * 9 * turn, Sampling(9, seed=10 * n + turn))
                said.append(found.token_ids)
                assert engine.pool.bytes <= 10 * PAGE_BYTES or kv_memory == "auto"
            branch = session.fork()
            said.append((await branch.generate([5], Sampling(9, seed=n))).token_ids)
            return said

        found = run(together(*map(converse, range(12))))
        return engine, found, sum(tokens for _, tokens in policy.read)

    _, found, read_again = texts(f"{10 * PAGE_BYTES / 1e3}KB")
    _, wanted, read = texts("auto")
    assert found == wanted
    assert read_again > 1.2 * read


def test_a_page_that_is_taken_anew_is_no_longer_known_by_what_came_after_it(tiny_policy):
    # two texts whose first pages differ and lie in the same place, one after the other, and whose
    # second pages have the same tokens: what these are depends on what came before
    tokens = [(11 * i) % 300 for i in range(50)]
    engine = started(tiny_policy, 128, kv_memory=f"{4 * PAGE_BYTES / 1e3}KB")
    for first in (5, 6):

        async def scenario(first=first):
            session = engine.open([first])
            given = (*tuple(first * i % 300 for i in range(PAGE - 1)), 9)
            await session.generate([], Sampling(PAGE, forced_ids=given))
            found = await session.generate(tokens, Sampling(3, seed=1))
            session.close()
            return [first, *given, *tokens], found

        history, found = run(scenario())
        row = ([*history, *found.token_ids], [False] * len(history) + [True] * 3)
        ((logprobs, *_),) = tiny_policy.read([row], 1000)
        assert torch.allclose(logprobs, torch.tensor(found.logprobs), atol=1e-4)


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_pages_come_back_when_a_turn_is_cancelled_or_its_session_closed_meanwhile(tiny_policy, how):
    engine = started(tiny_policy)

    async def scenario():
        session, other = engine.open(PROMPTS[0]), engine.open(PROMPTS[1])
        turn = asyncio.create_task(session.generate([], Sampling(40, seed=1)))
        while not engine._scheduler.active:
            await asyncio.sleep(0.001)
        if how == "cancelled":
            turn.cancel()
        else:
            session.close()
        await asyncio.gather(turn, return_exceptions=True)
        await other.generate([], Sampling(3, seed=1))
        other.close()
        assert engine.pool.available == engine.pool.count
        await engine.drain()

    run(scenario())


def test_an_engine_that_is_closed_while_it_samples_says_so_and_leaves_the_mode(tiny_model):
    policy = Policy(str(tiny_model))
    engine = started(policy, 256)

    async def scenario():
        turns = [
            asyncio.create_task(engine.open(p).generate([], Sampling(200, seed=1))) for p in PROMPTS
        ]
        while not engine._scheduler.active:
            await asyncio.sleep(0.001)
        engine.close()
        for found in await asyncio.gather(*turns, return_exceptions=True):
            assert "was closed while turns were being sampled" in str(found)
        await engine.drain()

    run(scenario())
    assert policy.network.training
    assert engine.pool.available == engine.pool.count
    engine.start(policy, 64)
    assert run(engine.open(PROMPTS[0]).generate([], Sampling(3, seed=1))).reason == "length"


def test_an_engine_that_is_closed_in_its_last_pass_gives_everything_back(tiny_model):
    policy = Watched(Policy(str(tiny_model)))
    engine = started(policy)
    computing, go_on = threading.Event(), threading.Event()

    def hidden(*rest, **options):
        computing.set()
        assert go_on.wait(10)
        return policy.policy.hidden(*rest, **options)

    policy.hidden = hidden

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
        found = await asyncio.wait_for(turn, 10)
        await engine.drain()
        engine.sync(1)
        return found

    assert list(run(scenario()).token_ids) == greedy_reference(tiny_policy, PROMPTS[0], 12)


def test_who_waits_is_told_when_the_loop_is_stopped(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        turn = asyncio.create_task(engine.open(PROMPTS[0]).generate([], GREEDY))
        for _ in range(2):  # it has asked, and the server has begun
            await asyncio.sleep(0)
        engine._server.cancel()
        with pytest.raises(RuntimeError, match="sampling was interrupted"):
            await turn
        await engine.drain()
        engine.sync(1)

    run(scenario())


def test_an_engine_that_is_started_again_has_forgotten_the_pages_of_before(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        sessions = [engine.open(prompt) for prompt in PROMPTS]
        first = await together(*(s.generate([], GREEDY) for s in sessions))
        engine.start(tiny_policy, 64)
        sessions[0].close()
        other = await engine.open(PROMPTS[0]).generate([], GREEDY)
        return first, other, await sessions[1].generate([7], GREEDY)

    first, other, again = run(scenario())
    assert other.token_ids == first[0].token_ids
    history = [*PROMPTS[1], *first[1].token_ids, 7]
    assert list(again.token_ids) == greedy_reference(tiny_policy, history, 12)


def test_a_page_that_nobody_else_needs_any_more_is_written_to_and_not_copied(tiny_policy):
    """A fork holds the last page of a turn that may come to need all pages: no page comes free when
    it gives that up, but none is needed then."""
    engine = started(tiny_policy, kv_memory=f"{2 * PAGE_BYTES / 1e3}KB")

    async def scenario():
        session = engine.open([5] * 10)
        first = await session.generate([], Sampling(5, 0))
        fork = session.fork()
        history = [*[5] * 10, *first.token_ids]
        long = await session.generate([7, 8], Sampling(2 * PAGE - len(history) - 1, 0))
        session.close()
        return history, long, await fork.generate([9], Sampling(6, 0))

    history, long, found = run(scenario())
    assert list(found.token_ids) == greedy_reference(tiny_policy, [*history, 9], 6)
    wanted = greedy_reference(tiny_policy, [*history, 7, 8], len(long.token_ids))
    assert list(long.token_ids) == wanted


def test_a_session_that_is_closed_while_it_is_sampled_keeps_its_pages_until_the_pass_is_over(
    tiny_policy,
):
    policy = Watched(tiny_policy)
    engine = started(policy, kv_memory=f"{4 * PAGE_BYTES / 1e3}KB")
    computing, go_on = threading.Event(), threading.Event()

    def hidden(*rest, **options):
        computing.set()
        assert go_on.wait(10)
        return policy.policy.hidden(*rest, **options)

    policy.hidden = hidden

    async def scenario():
        session = engine.open(PROMPTS[0])
        turn = asyncio.create_task(session.generate([], Sampling(9, 0)))
        await asyncio.to_thread(computing.wait, 10)
        session.close()
        held = engine.pool.count - engine.pool.available
        go_on.set()
        await turn
        await engine.open(PROMPTS[1]).generate([], Sampling(3, 0))
        return held, engine.pool.count - engine.pool.available

    assert run(scenario()) == (1, 1)


def test_what_a_turn_did_not_come_to_need_is_free_and_more_sessions_are_expected(tiny_policy):
    engine = started(tiny_policy, 4 * PAGE, kv_memory=f"{16 * PAGE_BYTES / 1e3}KB")
    anything = tuple(range(351))

    async def scenario():
        session = engine.open([5] * 10)
        await session.generate([], Sampling(3 * PAGE, 0, end_ids=anything))
        left = engine.pool.available
        session.close()
        return left

    assert engine.capacity == 4
    assert run(scenario()) == 15
    assert engine.capacity == 14  # nine tenths of 16 of one page each
    run(engine.drain())
    assert engine.capacity == 4


def test_nobody_is_to_read_again_for_a_turn_that_still_does_not_fit(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy, 5 * PAGE, kv_memory=f"{6 * PAGE_BYTES / 1e3}KB")

    async def scenario():
        idle, long, large = (engine.open([n] * PAGE) for n in (3, 4, 5))
        await idle.generate([], Sampling(2, seed=1))  # two pages
        busy = asyncio.create_task(long.generate([], Sampling(2 * PAGE, seed=2)))  # three pages
        while not engine._scheduler.active:
            await asyncio.sleep(0.001)
        waits = asyncio.create_task(large.generate([], Sampling(3 * PAGE, seed=3)))  # four
        while not engine._scheduler.waiting and not busy.done():
            await asyncio.sleep(0.001)
        kept = idle._history.covered
        await asyncio.gather(busy, waits)
        return kept

    assert run(scenario()) == PAGE + 1


def test_forks_do_not_write_to_what_they_share(tiny_policy):
    # a page is partly filled when it is shared, and then each goes its own way, in any order
    engine = started(tiny_policy)

    async def scenario():
        root = engine.open(PROMPTS[3])
        said = (await root.generate([], GREEDY)).token_ids
        branches = [root.fork() for _ in range(3)]
        first = await branches[1].generate([9], GREEDY)
        rest = await together(
            *(b.generate([9 + i], GREEDY) for i, b in enumerate([root, *branches[::2]]))
        )
        again = await branches[1].generate([8], GREEDY)
        for session in (root, *branches):
            session.close()
        assert engine.pool.available == engine.pool.count
        return said, first, rest, again

    said, first, rest, again = run(scenario())
    history = [*PROMPTS[3], *said]
    assert list(first.token_ids) == greedy_reference(tiny_policy, [*history, 9], 12)
    for i, found in enumerate(rest):
        assert list(found.token_ids) == greedy_reference(tiny_policy, [*history, 9 + i], 12)
    longer = [*history, 9, *first.token_ids, 8]
    assert list(again.token_ids) == greedy_reference(tiny_policy, longer, 12)


def test_what_prompts_begin_with_is_read_once_for_all_questions(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy, 256)
    system = [(7 * i) % 300 for i in range(2 * PAGE + 5)]
    prompts = [[*system, *range(n, n + 4)] for n in range(4)]
    policy.read.clear()

    async def scenario():
        return await together(*(engine.open(p).generate([], GREEDY) for p in prompts))

    for prompt, found in zip(prompts, run(scenario()), strict=True):
        assert list(found.token_ids) == greedy_reference(tiny_policy, prompt, 12)
    # the first reads all of its prompt, and the others what is no full page of it
    assert policy.read[:2] == [(1, len(prompts[0])), (1, 1 + 3 * 9)]


def test_pages_are_forgotten_when_the_weights_change(tiny_model):
    policy = Policy(str(tiny_model))
    engine = started(policy)
    prompt = [(7 * i) % 300 for i in range(2 * PAGE + 5)]
    before = run(engine.open(prompt).generate([], GREEDY))
    with torch.no_grad():
        policy.load().get_input_embeddings().weight.mul_(-1)
    engine.sync(1)
    after = run(engine.open(prompt).generate([], GREEDY))
    assert list(after.token_ids) == greedy_reference(policy, prompt, 12)
    assert after.token_ids != before.token_ids


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


def test_a_session_goes_on_after_the_memory_was_given_back(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        session = engine.open(PROMPTS[0])
        said = (await session.generate([], GREEDY)).token_ids
        await engine.drain()
        assert not engine.pool.allocated
        return said, await session.generate([7], GREEDY)

    said, found = run(scenario())
    history = [*PROMPTS[0], *said, 7]
    assert list(found.token_ids) == greedy_reference(tiny_policy, history, 12)


def test_passes_of_a_small_model_are_computed_on_one_thread_and_others_keep_theirs(tiny_policy):
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


def test_a_closed_session_gives_its_pages_back(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        sessions = [engine.open([n]) for n in range(6)]
        await together(*(s.generate([], Sampling(50, 0)) for s in sessions))
        left = [engine.pool.available]
        for session in sessions[:4]:
            session.close()
        return [*left, engine.pool.available]

    count = engine.pool.count
    assert run(scenario()) == [count - 12, count - 4]


def naive_attention(pool, layer, tables, starts, counts, query, scale):
    """Each query of each row by a loop over its keys."""
    keys, values = pool.store[layer].double()
    out, at = [], 0
    for table, start, count in zip(tables, starts, counts, strict=True):
        for t in range(start, start + count):
            for head in range(query.shape[1]):
                few = head * keys.shape[1] // query.shape[1]
                places = [(table[i // PAGE], few, i % PAGE) for i in range(t + 1)]
                k = torch.stack([keys[place] for place in places])
                v = torch.stack([values[place] for place in places])
                out.append((k @ query[0, head, at].double() * scale).softmax(0) @ v)
            at += 1
    return torch.stack(out).view(at, query.shape[1], -1)


@pytest.mark.parametrize("seed", range(4))
def test_attention_over_shared_pages_is_that_of_each_row_alone(seed):
    draw = random.Random(seed)
    shapes = Shapes()
    shapes.layers, shapes.heads, shapes.size = 2, 2, 8
    pool = Pool(200, shapes, torch.device("cpu"))
    torch.manual_seed(seed)
    pool.store.normal_()
    # a tree of pages: rows share chains of several lengths and widths, or nothing; the last page
    # of each is its own
    tables = []
    system = [pool.take() for _ in range(draw.randint(0, 3))]
    for _ in range(draw.randint(2, 5)):
        prompt = [*system, *(pool.take() for _ in range(draw.randint(0, 4)))]
        for _ in range(draw.randint(1, 3)):
            turn = [*prompt, *(pool.take() for _ in range(draw.randint(0, 1)))]
            tables += [[*turn, pool.take(), pool.take()] for _ in range(draw.randint(1, 3))]
    draw.shuffle(tables)
    starts = [PAGE * (len(t) - 2) + draw.randrange(2 * PAGE) for t in tables]
    fed = [[pool.take() for _ in range(3)] for _ in range(4)]
    begun = [0, 0, draw.randrange(PAGE), PAGE + 3]
    long = [draw.randint(2, 40) for _ in fed]
    feeds = [Feed(t, s, [0] * n) for t, s, n in zip(fed, begun, long, strict=True)]
    # one pass, its rows and feeds, then one of the rows alone by the same plan
    plan = Plan(tables, pool)
    for rest, at in ((feeds, starts), ([], [n + 1 for n in starts])):
        at = [min(n, PAGE * len(t) - 1) for n, t in zip(at, tables, strict=True)]
        attend = Pass(plan, np.array(at), rest)
        tokens = len(at) + sum(len(feed.ids) for feed in rest)
        query, key, value = (torch.randn(1, tokens, h, 8).transpose(1, 2) for h in (4, 2, 2))
        found = attend(1, query, key, value, 0.4, None)[0]
        all_tables = [*tables, *(feed.table for feed in rest)]
        all_starts = [*at, *(feed.start for feed in rest)]
        counts = [*[1] * len(at), *(len(feed.ids) for feed in rest)]
        wanted = naive_attention(pool, 1, all_tables, all_starts, counts, query, 0.4)
        assert torch.allclose(found.double(), wanted, atol=1e-5)
        places = [p for s, c in zip(all_starts, counts, strict=True) for p in range(s, s + c)]
        assert attend.positions.tolist() == places
        # and what the pass brought is where it belongs
        last = all_tables[-1][places[-1] // PAGE], slice(None), places[-1] % PAGE
        assert torch.equal(pool.store[1, 0][last], key[0, :, -1])
        assert torch.equal(pool.store[1, 1][last], value[0, :, -1])


def test_distributions_are_cut_as_a_loop_over_tokens_cuts_them():
    torch.manual_seed(0)
    log_p = (2 * torch.randn(40, 30)).log_softmax(-1)
    draw = random.Random(0)
    samplings = [
        Sampling(
            1,
            top_k=draw.choice([0, 1, 5, 30, 99]),
            min_p=draw.choice([0.0, 0.1, 1.0]),
            top_p=draw.choice([1.0, 0.9, 0.3]),
        )
        for _ in log_p
    ]
    for row, sampling, found in zip(log_p, samplings, truncated(log_p, samplings), strict=True):
        order = row.argsort(descending=True).tolist()
        left = order[: sampling.top_k or None]
        p = row.exp().tolist()
        left = [i for i in left if p[i] >= sampling.min_p * p[order[0]] * (1 - 1e-6)]
        most, total, kept = sum(p[i] for i in left), 0.0, []
        for i in left:
            if total < sampling.top_p * most:
                kept.append(i)
            total += p[i]
        share = sum(p[i] for i in kept)
        for i in range(30):
            if i in kept:
                assert float(found[i]) == pytest.approx(math.log(p[i] / share), abs=1e-5)
            else:
                assert float(found[i]) == -math.inf


def test_draws_from_a_cut_distribution_follow_it_beside_others_that_are_whole(tiny_policy):
    # frequencies of the first token over 2,000 draws, within 5 standard errors
    draws, cut = 2000, Sampling(1, 2.0, top_k=3)
    with torch.no_grad():
        logits = tiny_policy.load()(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1]
    best = logits.topk(3)
    expected = (best.values / 2).softmax(-1)
    engine = started(tiny_policy, slots=4096)

    async def scenario():
        root = engine.open(PROMPTS[1])
        how = [replace(cut, seed=i) if i < draws else Sampling(1, 2.0, seed=i) for i in range(2500)]
        return await together(*(root.fork().generate([], s) for s in how))

    found = run(scenario())
    counts = [sum(c.token_ids[0] == i for c in found[:draws]) for i in best.indices.tolist()]
    assert sum(counts) == draws
    for count, p in zip(counts, expected.tolist(), strict=True):
        assert abs(count / draws - p) <= 5 * math.sqrt(p * (1 - p) / draws)
    first = best.indices.tolist().index(found[0].token_ids[0])
    assert found[0].logprobs[0] == pytest.approx(math.log(expected[first]), abs=1e-5)
    assert len({c.token_ids for c in found[draws:]}) > 3


# ------------------------------------------------------------------- the life of an engine


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
        found = await beside
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
        return first, found, await anew.generate([11, 12], GREEDY)

    first, beside, anew = run(scenario())
    assert list(beside.token_ids) == greedy_reference(tiny_policy, PROMPTS[1], 12)
    history = [*PROMPTS[0], *first.token_ids, 11, 12]
    assert list(anew.token_ids) == greedy_reference(tiny_policy, history, 12)


def test_a_turn_that_fails_leaves_its_session_unusable_and_the_engine_as_it_was(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy)
    hidden = policy.hidden

    async def scenario():
        session, other = engine.open(PROMPTS[0]), engine.open(PROMPTS[1])
        policy.hidden = raises
        with pytest.raises(RuntimeError, match="out of memory"):
            await session.generate([], GREEDY)
        policy.hidden = hidden
        with pytest.raises(RuntimeError, match="none after close"):
            await session.generate([], GREEDY)
        return await other.generate([], GREEDY)

    assert list(run(scenario()).token_ids) == greedy_reference(tiny_policy, PROMPTS[1], 12)


def test_a_session_generates_one_turn_at_a_time(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        session = engine.open(PROMPTS[0])
        return await asyncio.gather(
            session.generate([], GREEDY), session.generate([], GREEDY), return_exceptions=True
        )

    found, refused = run(scenario())
    assert list(found.token_ids) == greedy_reference(tiny_policy, PROMPTS[0], 12)
    assert "one turn at a time" in str(refused)


def test_sessions_end_when_the_weights_change(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        engine.sync(1)
        unread, read = engine.open(PROMPTS[0]), engine.open(PROMPTS[1])
        await read.generate([], GREEDY)
        fork = read.fork()
        engine.sync(2)
        for session in (unread, read, fork):
            with pytest.raises(RuntimeError, match="weights change: open a new one"):
                await session.generate([1], GREEDY)
            with pytest.raises(RuntimeError, match="weights change"):
                session.fork()
            session.close()
        return await engine.open(PROMPTS[0]).generate([], GREEDY)

    assert list(run(scenario()).token_ids) == greedy_reference(tiny_policy, PROMPTS[0], 12)


# ------------------------------------------------------------------- models it can sample


@pytest.fixture
def model(random_model):
    """Makes a loaded policy of random weights of any architecture."""

    def make(name, **options):
        policy = Policy(str(random_model(name, **options)))
        policy.load()
        return policy

    return make


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 8}),
        ("Llama", {}),
        ("Mistral", {"sliding_window": 256}),
        ("Gemma", {"head_dim": 8}),
        ("Llama4Text", {"intermediate_size_mlp": 64, "num_local_experts": 2}),
    ],
)
def test_greedy_turns_are_those_of_the_models_own_generate(model, name, options):
    # ragged prompts that begin alike or not, four turns, a fork at the second
    policy = model(name, **options)
    engine = started(policy, 256, slots=5)
    alike = list(range(100, 150))
    prompts = [[*alike, 5, 6, 7], [*alike, 9], [3, 1, 4, 1, 5], [*range(200, 231)]]

    async def converse(n, prompt):
        session, history, seen = engine.open(prompt), list(prompt), []
        for turn in range(4):
            new = [(11 * n + 3 * turn + i) % 300 + 3 for i in range(turn * (n + 1))]
            if turn == 2:
                branch = session.fork()
                found = await branch.generate([77], GREEDY)
                seen.append(([*history, 77], found.token_ids))
            found = await session.generate(new, GREEDY)
            seen.append(([*history, *new], found.token_ids))
            history += [*new, *found.token_ids]
        return seen

    turns = run(together(*(converse(n, prompt) for n, prompt in enumerate(prompts))))
    run(engine.drain())
    plain = transformers.GenerationConfig(
        max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    network = policy.load().eval()
    for history, found in (turn for seen in turns for turn in seen):
        ids = torch.tensor([history])
        wanted = network.generate(ids, attention_mask=ids * 0 + 1, generation_config=plain)
        assert list(found) == wanted[0, len(history) :].tolist()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("Llama", {}, marks=pytest.mark.slow),
        ("Mistral", {"sliding_window": 128}),
        pytest.param("Qwen3", {"head_dim": 8}, marks=pytest.mark.slow),
        ("Gemma", {"head_dim": 8}),
        pytest.param("Olmo2", {}, marks=pytest.mark.slow),
    ],
)
def test_the_engine_keeps_to_the_contract_with_other_models(model, name, options):
    check_engine(Slots(slots=3), model(name, **options))


def test_the_engine_keeps_to_the_contract(tiny_policy):
    check_engine(Slots(), tiny_policy)
    check_engine(Slots(slots=1, prefill_tokens=8), tiny_policy, temperature=0.7)
    check_engine(Slots(kv_memory=f"{2 * PAGE_BYTES / 1e3}KB"), tiny_policy)


def test_a_model_whose_log_probabilities_would_be_wrong_is_refused(model):
    with pytest.raises(RecipeError, match=r"\(CohereForCausalLM\) changes logits after its head"):
        model("Cohere", logit_scale=0.06)
    with pytest.raises(RecipeError, match="Gemma2ForCausalLM does not support"):
        model("Gemma2", head_dim=8, final_logit_softcapping=0.5)


@pytest.mark.parametrize("name", ["Mistral", "Phi3", "Starcoder2"])
def test_a_window_shorter_than_a_trajectory_is_refused(model, name):
    policy = model(name, sliding_window=16)
    with pytest.raises(
        RecipeError, match=rf"{name}ForCausalLM cannot be sampled.*Set rollout\.max_tokens within"
    ):
        Slots().start(policy, 64)
    engine = started(policy, 15)
    found = run(engine.open(PROMPTS[0]).generate([], Sampling(9, 0)))
    assert list(found.token_ids) == greedy_reference(policy, PROMPTS[0], 9)


def test_padding_stands_at_no_position_beyond_its_rows_own(model):
    # rotary embeddings that are scaled by the largest position of a batch beyond the 256th: a short
    # turn after a long history, read together with much at once, must not get there by its padding
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    policy = model("Llama", rope_parameters=rope)

    async def scenario(company: bool):
        engine = started(policy, 256)
        long, wide = engine.open([7] * 235), engine.open([9])
        await together(long.generate([], Sampling(1, 0)), wide.generate([], Sampling(1, 0)))
        turns = [long.generate([5], Sampling(8, 0))]
        if company:
            turns.append(wide.generate([6] * 200, Sampling(8, 0)))
        return (await together(*turns))[0]

    alone, together_with = run(scenario(False)), run(scenario(True))
    assert alone.token_ids == together_with.token_ids
    assert alone.logprobs == pytest.approx(together_with.logprobs, abs=1e-4)


def test_an_engine_that_starts_anew_knows_the_stop_strings_of_its_new_tokenizer(tiny_policy):
    engine = Slots()
    engine.close()  # harmless before a start
    text = tiny_policy.tokenizer.decode(greedy_reference(tiny_policy, PROMPTS[0], 12))
    stop = Sampling(12, 0, stop=(text[-1],))
    engine._closers = {text[-1]: frozenset()}  # as another vocabulary would have it
    engine.start(tiny_policy, 64)
    assert run(engine.open(PROMPTS[0]).generate([], stop)).reason == "stop"


# ------------------------------------------------------------------- engines that are broken


class Around(Session):
    """A session of `Slots`; what is broken overrides a method."""

    def __init__(self, engine, inner, prompt):
        self.engine, self.inner, self.prompt = engine, inner, prompt

    async def generate(self, new_ids, sampling):
        return await self.inner.generate(new_ids, sampling)

    def fork(self):
        return type(self)(self.engine, self.inner.fork(), self.prompt)

    def close(self):
        self.inner.close()


class Wrapped(Engine):
    """`Slots` behind a session of one's own."""

    def __init__(self, session=Around, seeded=True):
        self.slots, self.session, self.seeded = Slots(), session, seeded

    def start(self, policy, max_tokens):
        self.slots.start(policy, max_tokens)

    def sync(self, version):
        self.slots.sync(version)

    def open(self, prompt_ids):
        return self.session(self, self.slots.open(prompt_ids), prompt_ids)

    async def drain(self):
        await self.slots.drain()

    def close(self):
        self.slots.close()


class ForgetsNewIds(Around):
    async def generate(self, new_ids, sampling):
        return await self.inner.generate([], sampling)


class ForgetsTheTurnsWhenForked(Around):
    def fork(self):
        return self.engine.open(self.prompt)


class IgnoresStops(Around):
    async def generate(self, new_ids, sampling):
        return await self.inner.generate(new_ids, replace(sampling, stop=()))


class IgnoresEnds(Around):
    async def generate(self, new_ids, sampling):
        return await self.inner.generate(new_ids, replace(sampling, end_ids=()))


class DropsTheLastToken(Around):
    async def generate(self, new_ids, sampling):
        found = await self.inner.generate(new_ids, sampling)
        return replace(found, token_ids=found.token_ids[:-1])


class LogprobsOfNothing(Around):
    async def generate(self, new_ids, sampling):
        found = await self.inner.generate(new_ids, sampling)
        return replace(found, logprobs=(0.0,) * len(found.logprobs))


class LogprobsWorseTurnByTurn(Around):
    async def generate(self, new_ids, sampling):
        found = await self.inner.generate(new_ids, sampling)
        return replace(found, logprobs=tuple(p - 0.1 * bool(new_ids) for p in found.logprobs))


class IgnoresForced(Around):
    async def generate(self, new_ids, sampling):
        return await self.inner.generate(new_ids, replace(sampling, forced_ids=()))


class IgnoresCuts(Around):
    async def generate(self, new_ids, sampling):
        return await self.inner.generate(new_ids, replace(sampling, top_k=0, min_p=0.0, top_p=1.0))


class CannotCut(Around):
    async def generate(self, new_ids, sampling):
        if sampling.truncated or sampling.forced_ids:
            raise NotImplementedError("no cuts")
        return await self.inner.generate(new_ids, sampling)


class HoldsTwo(Wrapped):
    """Mixes up its sessions if there are more than it holds."""

    capacity = 2

    def open(self, prompt_ids):
        self.opened = getattr(self, "opened", 0) + (len(prompt_ids) == 41)
        return super().open(prompt_ids if self.opened != 3 else [9, *prompt_ids[1:]])


class IgnoresTheSeed(Around):
    numbers = itertools.count()

    async def generate(self, new_ids, sampling):
        return await self.inner.generate(new_ids, replace(sampling, seed=next(self.numbers)))


class HasOneSeed(Around):
    async def generate(self, new_ids, sampling):
        return await self.inner.generate(new_ids, replace(sampling, seed=0))


class GeneratesAfterClose(Around):
    def close(self):
        pass


class GeneratesAfterCancel(Around):
    async def generate(self, new_ids, sampling):
        spare = self.inner.fork()
        try:
            return await self.inner.generate(new_ids, sampling)
        except asyncio.CancelledError:
            self.inner = spare
            raise


class GeneratesAfterSync(Wrapped):
    def sync(self, version):
        pass


class ReadsOtherwiseAfterSync(Wrapped):
    """What it has read before a sync, it reads backwards after it."""

    def sync(self, version):
        super().sync(version)
        self.order = -1 if version > 1 else 1

    def open(self, prompt_ids):
        return super().open(prompt_ids[:: self.order])


class GivesTokensBack(Around):
    """What is in its history is not what it says it sampled."""

    async def generate(self, new_ids, sampling):
        found = await self.inner.generate(new_ids, sampling)
        self.inner = self.engine.slots.open([*self.prompt, *found.token_ids[:-1], 7])
        return found


def test_an_engine_behind_another_passes_and_so_does_one_that_promises_no_seeds(tiny_policy):
    check_engine(Wrapped(), tiny_policy)
    check_engine(Wrapped(IgnoresTheSeed, seeded=False), tiny_policy)
    check_engine(Wrapped(CannotCut), tiny_policy)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            Wrapped(ForgetsNewIds),
            r"Wrapped, .* goes on from \[.*\] with \[1.*\] as .*but reads the same",
        ),
        (Wrapped(ForgetsTheTurnsWhenForked), r"goes on from \[.*\] with \[99\] as"),
        (Wrapped(GivesTokensBack), r"goes on from \[.*\] with \[1.*\] as"),
        (Wrapped(IgnoresStops), r"does not stop at '.'"),
        (Wrapped(IgnoresEnds), r"does not end at the token \d+"),
        (Wrapped(IgnoresForced), r"was to take \(\d+, \d+, \d+\), and gave"),
        (Wrapped(IgnoresCuts), r"is to draw the likeliest tokens alone.*top_k=1"),
        (HoldsTwo(), r"to go on in 4 sessions at once, gives .* alone"),
        (Wrapped(DropsTheLastToken), "asked for 6 tokens, and gave"),
        (Wrapped(LogprobsWorseTurnByTurn), r"goes on from \[.*\] with \[1.*\] as"),
        (Wrapped(LogprobsOfNothing), "log-probabilities"),
        (Wrapped(IgnoresTheSeed), r"is seeded, but seeds 1, 1, 2"),
        (Wrapped(HasOneSeed), r"is seeded, but seeds 1, 1, 2"),
        (Wrapped(GeneratesAfterClose), r"generates after close\(\)"),
        (Wrapped(GeneratesAfterCancel), "generates after a turn that was cancelled"),
        (ReadsOtherwiseAfterSync(), r"with the same weights, gives Completion.* and Completion"),
        (GeneratesAfterSync(), "generates on in a session that remembers older weights"),
    ],
    ids=lambda value: value.session.__name__ if isinstance(value, Wrapped) else "x",
)
def test_a_broken_engine_is_caught(tiny_policy, engine, message):
    with pytest.raises(AssertionError, match=message):
        check_engine(engine, tiny_policy)


class RaisesAt(Around):
    """Fails in one of its calls; a test says which."""

    async def generate(self, new_ids, sampling):
        self.engine.step("generate", new_ids, sampling)
        return await super().generate(new_ids, sampling)

    def fork(self):
        self.engine.step("fork")
        return super().fork()

    def close(self):
        self.engine.step("session.close")
        super().close()


class Failing(Wrapped):
    """Raises in the steps that a test names."""

    def __init__(self, fails):
        super().__init__(RaisesAt)
        self.fails = fails

    def step(self, *what):
        if self.fails(*what):
            raise KeyError(what[0])

    def start(self, policy, max_tokens):
        self.step("start")
        super().start(policy, max_tokens)

    def sync(self, version):
        self.step("sync", version)
        super().sync(version)

    async def drain(self):
        self.step("drain")
        await super().drain()

    def close(self):
        self.step("close")
        super().close()


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (
            lambda *w: w == ("start",),
            r"^Failing\.start\(policy, 64\), and sync\(1\) after it, raised",
        ),
        (
            lambda *w: w == ("sync", 1),
            r"^Failing\.start\(policy, 64\), and sync\(1\) after it, raised",
        ),
        (
            lambda *w: w == ("fork",),
            r"from \[44, 2\], then with \[12, 13, 14\] or, forked, \[99\], ra",
        ),
        (
            lambda *w: w[0] == "generate" and w[1] == [15],
            r"from \[7, 7, .*\], then with \[15\] or, fo",
        ),
        (
            lambda *w: w[0] == "generate" and w[2].end_ids,
            r"from \[5, 9, 33, 71\] with .*end_ids=\(\d",
        ),
        (lambda *w: w[0] == "generate" and w[2].stop, r"from \[5, 9, 33, 71\] with .*stop=\('"),
        (lambda *w: w[0] == "generate" and w[2].seed == 9, r"\[5, 9, 33, 71\] with .*seed=9"),
        (lambda *w: w == ("session.close",), "a session of Failing, closed or cancelled, raised"),
        (lambda *w: w == ("drain",), "a session of Failing, closed or cancelled, raised"),
        (lambda *w: w == ("sync", 2), "Failing, after a second sync, raised"),
        (lambda *w: w == ("close",), r"^Failing\.close\(\), called twice, raised"),
    ],
)
def test_a_step_in_which_an_engine_raises_is_told(tiny_policy, fails, message):
    with pytest.raises(AssertionError, match=f"{message}.*KeyError") as raised:
        check_engine(Failing(fails), tiny_policy)
    assert isinstance(raised.value.__cause__, KeyError)


class DrainsAtOnce(Wrapped):
    """`drain` gives no other coroutine a turn."""

    async def drain(self):
        pass


class RaisesWhenCancelled(Around):
    async def generate(self, new_ids, sampling):
        try:
            return await self.inner.generate(new_ids, sampling)
        except asyncio.CancelledError:
            raise KeyError("cancelled") from None


def test_a_cancelled_turn_is_looked_at_though_drain_waits_for_nothing(tiny_policy):
    check_engine(DrainsAtOnce(), tiny_policy)
    with pytest.raises(AssertionError, match="generates after a turn that was cancelled"):
        check_engine(DrainsAtOnce(GeneratesAfterCancel), tiny_policy)
    with pytest.raises(AssertionError, match="closed or cancelled, raised KeyError: 'cancelled'"):
        check_engine(Wrapped(RaisesWhenCancelled), tiny_policy)


# ------------------------------------------------------------------- a GPU's kernel for pages


def naive_varlen(query, key, value, begins, reach, most, most_keys, **options):
    """What torch documents of its kernel, in plain loops: sequences one after the other, keys in
    pages or one after the other, of which the first `seqused_k` count, and the last query of each
    sequence on a level with the last of them."""
    table, used = options.pop("block_table"), options.pop("seqused_k")
    assert options.pop("enable_gqa")
    left, right = options.pop("window_size")
    scale = options.pop("scale")
    assert not options
    assert {begins.dtype, used.dtype} == {torch.int32}
    assert int(begins.diff().max()) == most
    assert int(used.max()) <= most_keys
    assert left == -1
    if table is None:
        assert reach.dtype == torch.int32
        assert int(reach[-1]) == len(key)
        assert int(reach.diff().max()) == most_keys
    else:
        assert (reach, table.dtype) == (None, torch.int32)
        assert most_keys == table.shape[1] * key.shape[1]
    out = []
    for n, length in enumerate(used.tolist()):
        if table is None:
            k, v = (side[reach[n] : reach[n + 1]][:length] for side in (key, value))
        else:
            k, v = (side[table[n].long()].flatten(0, 1)[:length] for side in (key, value))
        asked = query[begins[n] : begins[n + 1]]
        for i, q in enumerate(asked):
            seen = length if right < 0 else length - len(asked) + 1 + i
            few = q.shape[0] // k.shape[1]
            scores = torch.einsum("hd,thd->ht", q, k[:seen].repeat_interleave(few, 1)) * scale
            weights = scores.softmax(-1)
            out.append(torch.einsum("ht,thd->hd", weights, v[:seen].repeat_interleave(few, 1)))
    return torch.stack(out)


def takes_no_pages(*arguments, **options):
    if options["block_table"] is not None:
        raise RuntimeError("paged attention takes FlashAttention 3")
    return naive_varlen(*arguments, **options)


KERNELS = {"pages": naive_varlen, "gathered": takes_no_pages}


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    """A CPU that takes a kernel for pages, with or without a table of them, for its own."""
    monkeypatch.setattr(turnrl_slots.ways, "takes_ragged", lambda *_: True)
    monkeypatch.setattr(turnrl_slots.kernel, "varlen_attn", KERNELS[request.param])
    return request.param


def test_turns_read_by_a_kernel_are_those_of_full_forward_passes(tiny_policy, kernel):
    # ragged prompts that begin alike or not, some begun while others are sampled, and forks
    engine = started(tiny_policy, 256, slots=3)
    assert engine.pool.kernel == kernel
    alike = [(7 * i) % 300 for i in range(2 * PAGE + 5)]
    prompts = [*PROMPTS, [*alike, 1], [*alike, 2, 3]]

    async def converse(n, prompt):
        session, history, seen = engine.open(prompt), list(prompt), []
        for turn in range(3):
            new = [(11 * n + 3 * turn + i) % 300 for i in range(turn * (n + 1))]
            if turn == 2:
                found = await session.fork().generate([77], GREEDY)
                seen.append(([*history, 77], found.token_ids))
            found = await session.generate(new, replace(GREEDY, max_tokens=3 + n))
            seen.append(([*history, *new], found.token_ids))
            history += [*new, *found.token_ids]
        return seen

    for seen in run(together(*(converse(n, p) for n, p in enumerate(prompts)))):
        for history, found in seen:
            assert list(found) == greedy_reference(tiny_policy, history, len(found))


def test_sessions_give_up_pages_that_a_kernel_reads_and_go_on(tiny_policy, kernel):
    engine = started(tiny_policy, 100, kv_memory=f"{11 * PAGE_BYTES / 1e3}KB")
    assert (engine.pool.count, engine.pool.bytes) == (10, 11 * PAGE_BYTES)

    async def converse(n):
        session, history = engine.open([n + 1] * 20), [n + 1] * 20
        for turn in range(3):
            found = await session.generate([n] * 9 * turn, replace(GREEDY, max_tokens=9))
            history += [*[n] * 9 * turn, *found.token_ids]
        return history

    for history in run(together(*map(converse, range(6)))):
        assert history[-9:] == greedy_reference(tiny_policy, history[:-9], 9)
    assert engine.pool.store.shape[2] == 11


def off_by_one(*arguments, **options):
    return naive_varlen(*arguments, **{**options, "seqused_k": options["seqused_k"] - 1})


def refuses(*_, **options):
    raise TypeError("varlen_attn() got an unexpected keyword argument 'seqused_k'")


@pytest.mark.parametrize("broken", [off_by_one, refuses])
def test_a_kernel_that_is_wrong_or_refuses_is_not_used(tiny_policy, broken, monkeypatch, caplog):
    monkeypatch.setattr(turnrl_slots.ways, "takes_ragged", lambda *_: True)
    monkeypatch.setattr(turnrl_slots.kernel, "varlen_attn", broken)
    before = torch.get_rng_state()
    with caplog.at_level("INFO"):
        engine = started(tiny_policy)
    assert engine.pool.kernel is None
    assert torch.equal(torch.get_rng_state(), before)
    told = " ".join(record.message for record in caplog.records)
    assert "no attention over pages (gathered): " in told
    assert "it is off by" in told or "unexpected keyword" in told
    found = run(engine.open(PROMPTS[0]).generate([], GREEDY))
    assert list(found.token_ids) == greedy_reference(tiny_policy, PROMPTS[0], 12)


# ------------------------------------------------------------------- merged weights


@pytest.fixture(params=["none", "nf4"])
def adapted(request, tiny_model):
    """A policy whose adapter has learnt something, on a plain or a 4-bit base."""
    policy = Policy(str(tiny_model), quantization=request.param, lora=Lora(r=4))
    policy.load()
    move(policy, 1)
    return policy


def move(policy, seed):
    """The adapter as if it had learnt something else."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_" in name:
                weight.copy_(0.2 * torch.randn(weight.shape, generator=rng))


def logprobs_of(policy, decode_weights):
    """Of the same forced tokens."""
    forced = Sampling(20, forced_ids=tuple(range(50, 70)))
    engine = started(policy, decode_weights=decode_weights)
    return run(engine.open(PROMPTS[3]).generate([], forced)).logprobs


def learner(policy):
    """What learning relies on, to be compared: modules, their attributes, weights, gradients."""
    modules = [(id(m), m.training, sorted(vars(m))) for m in policy.load().modules()]
    weights = [(id(w), w.requires_grad, w.detach().clone()) for w in policy.parameters()]
    gradients = [w.grad is not None and (id(w.grad), w.grad.clone()) for w in policy.parameters()]
    return modules, weights, gradients


def same(one, other):
    assert one[0] == other[0]
    for before, after in zip(one[1] + one[2], other[1] + other[2], strict=True):
        if before is False or after is False:
            assert before is after
        else:
            assert before[:-1] == after[:-1]
            assert torch.equal(before[-1], after[-1])


def test_merged_weights_give_the_log_probabilities_of_base_and_adapter(adapted):
    found, wanted = logprobs_of(adapted, "merged"), logprobs_of(adapted, "adapter")
    assert found == pytest.approx(wanted, rel=1e-4)
    assert found != wanted  # another order of sums: it is not the same path
    move(adapted, 2)
    assert logprobs_of(adapted, "adapter") != pytest.approx(wanted, abs=0.1)


def test_merged_weights_are_made_anew_for_each_sync_and_given_back(adapted):
    engine = started(adapted, decode_weights="merged")
    forced = Sampling(20, forced_ids=tuple(range(50, 70)))

    async def scenario():
        assert engine.merged is None  # the one that the start was checked with
        for version, drains in enumerate([True, False, True]):
            move(adapted, version)
            engine.sync(version)
            found = await engine.open(PROMPTS[3]).generate([], forced)
            assert engine.merged is not None
            if drains:
                await engine.drain()
                assert engine.merged is None
            yield found.logprobs

    async def collect():
        return [found async for found in scenario()]

    for version, found in enumerate(run(collect())):
        move(adapted, version)
        assert found == pytest.approx(logprobs_of(adapted, "adapter"), rel=1e-4)


@pytest.mark.parametrize("end", ["drained", "failed", "cancelled"])
def test_the_learner_is_as_it_was_however_sampling_with_merged_weights_ends(adapted, end):
    rows = [([5, 9, 33, 71], [False, False, True, True])]
    adapted.train()
    adapted(lay_out(rows))[0].sum().backward()
    before = learner(adapted)
    policy = Watched(adapted)
    engine = started(policy, decode_weights="merged")
    same(before, learner(adapted))
    policy.read.clear()

    def fails_later(hidden):
        if len(policy.read) > 3:
            raise RuntimeError("out of memory")
        return adapted.logits(hidden)

    async def scenario():
        session = engine.open(PROMPTS[0])
        if end == "failed":
            policy.logits = fails_later
            with pytest.raises(RuntimeError, match="out of memory"):
                await session.generate([], GREEDY)
        elif end == "cancelled":
            task = asyncio.create_task(session.generate([], Sampling(50)))
            while len(policy.read) < 3:
                await asyncio.sleep(0.001)
            task.cancel()
        else:
            await session.generate([], GREEDY)
        await engine.drain()

    run(scenario())
    assert len(policy.read) >= 3
    same(before, learner(adapted))
    adapted.zero_grad()
    adapted(lay_out(rows))[0].sum().backward()
    for kept, weight in zip(before[2], adapted.parameters(), strict=True):
        assert (kept is False) == (weight.grad is None)
        assert kept is False or torch.allclose(kept[1], weight.grad, atol=1e-6)


def test_who_reads_the_network_between_passes_finds_it_as_it_is_learnt(adapted):
    engine = started(adapted, decode_weights="merged")

    async def scenario():
        await engine.open(PROMPTS[0]).generate([], GREEDY)
        with torch.no_grad():
            ids = torch.tensor([PROMPTS[0]])
            with (
                adapted.reference()
            ):  # the adapter is off, and merged weights know of no such thing
                off = adapted.load()(input_ids=ids).logits
            on = adapted.load()(input_ids=ids).logits
        await engine.drain()
        return off, on

    off, on = run(scenario())
    assert not torch.allclose(off, on, atol=0.1)


def test_pages_are_tried_with_the_weights_that_are_sampled_with(tiny_model):
    # in bfloat16 base and adapter are a quarter of a nat from their sum, which is no fault of pages
    policy = Policy(str(tiny_model), "nf4", Lora(r=4), dtype="bfloat16")
    policy.load()
    move(policy, 1)
    assert started(policy, 256, decode_weights="merged").capacity


def test_merging_what_has_no_adapter_is_refused_with_the_way_out(tiny_policy):
    told = r"decode_weights is 'merged'.*Set it to 'adapter', or add policy\.lora"
    with pytest.raises(RecipeError, match=told):
        started(tiny_policy, decode_weights="merged")


# ------------------------------------------------------------------- steps that are replayed


def test_rows_are_padded_to_few_sizes_and_at_most_by_a_fifth_where_they_cost_most():
    wanted = {1: 1, 2: 2, 3: 4, 5: 8, 8: 8, 9: 12, 13: 16, 17: 24, 25: 32, 100: 128, 129: 192}
    wanted |= {193: 256, 256: 256, 257: 320, 336: 384, 500: 512, 513: 640, 840: 896}
    assert {rows: padded(rows) for rows in wanted} == wanted
    assert len({padded(rows) for rows in range(1, 513)}) == 18
    assert all(rows > 0.8 * padded(rows) for rows in range(257, 2000))


class Recorder:
    """What `Graphs` does, without a GPU: a replay computes anew from the buffers, and leaves the
    result where the recording did, whatever the step was given in between."""

    def __init__(self):
        self.warmed, self.recorded, self.forgotten = [], [], 0
        self.replayed = 0

    @contextlib.contextmanager
    def aside(self):
        self.warmed.append(None)
        yield

    def record(self, compute):
        found = torch.full_like(compute(), torch.nan)
        self.recorded.append(found.shape[0])

        def replay():
            self.replayed += 1
            found.copy_(compute())

        return replay, found

    def forget(self):
        self.forgotten += 1


def converse_by_steps(policy, graphs, slots=64):
    """Turns of several lengths, so that rows become fewer and pages more; what was read."""
    watched = Watched(policy)
    engine = started(watched, 256, slots=slots)
    engine.decoder.graphs = graphs
    watched.read.clear()
    counts = [5, 9, 20, 23, 29, 40, 40]

    async def scenario():
        for version in range(2):
            engine.sync(version)
            sessions = [engine.open([n + 1] * (3 + 5 * n)) for n in range(len(counts))]
            said = await together(
                *(
                    s.generate([], replace(GREEDY, max_tokens=count))
                    for s, count in zip(sessions, counts, strict=True)
                )
            )
            await engine.drain()
        return said

    for n, found in enumerate(run(scenario())):
        wanted = greedy_reference(policy, [n + 1] * (3 + 5 * n), counts[n])
        assert list(found.token_ids) == wanted
    return [rows for _, rows in watched.read]


def test_padding_changes_no_token_and_writes_to_a_page_that_is_nobodys(tiny_policy, kernel):
    read = converse_by_steps(tiny_policy, None, slots=3)
    assert {1, 2, 4} <= set(read)  # three rows take four
    pool = Pool(4, shapes_of(2, 2, 8), torch.device("cpu"), kernel)
    table = [pool.take(), pool.take()]

    def hidden(tokens, positions, attend):
        parts = (torch.ones(1, heads, len(tokens), 8) for heads in (4, 2, 2))
        return attend(0, *parts, None, None)[0].flatten(1)

    step = Decoder(pool, hidden, None, PAGE)
    step(Tables([table] * 5, pool), np.full(5, PAGE + 2), [7] * 5)
    written = pool.store[0].ne(0).any(-1).any(-1).any(0)
    assert written.nonzero().tolist() == [[table[1], 2], [pool.nobody, 0]]
    assert pool.nobody == 4


def shapes_of(layers, heads, size):
    shapes = Shapes()
    shapes.layers, shapes.heads, shapes.size, shapes.asking = layers, heads, size, 2 * heads
    return shapes


@pytest.mark.parametrize("kernel", ["pages"], indirect=True)
def test_a_size_is_computed_once_then_recorded_and_replayed(tiny_policy, kernel):
    graphs = Recorder()
    converse_by_steps(tiny_policy, graphs)
    # 7 rows while all last, then 6, 5, 4, .. 2: sizes of 8, 4 and 2, in both collections
    assert sorted(graphs.recorded) == [2, 2, 4, 4, 8, 8]
    assert len(graphs.recorded) == len(graphs.warmed)
    assert graphs.replayed > 40
    assert graphs.forgotten >= 4  # at each sync and each drain


@pytest.mark.parametrize("kernel", ["pages"], indirect=True)
def test_graphs_are_forgotten_with_the_memory_that_they_know(tiny_policy, kernel):
    engine = started(tiny_policy)
    engine.decoder.graphs = graphs = Recorder()

    async def scenario():
        for version in range(2):
            engine.sync(version)
            await engine.open(PROMPTS[0]).generate([], GREEDY)
            assert engine.decoder.steps
            await engine.drain()
            assert not engine.decoder.steps
        return len(graphs.recorded)

    assert run(scenario()) == 2


class Broken(Recorder):
    def record(self, compute):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Stale(Recorder):
    """Its replays leave what they left when they were recorded: they do not read the buffers."""

    def record(self, compute):
        found = torch.randn_like(compute())
        return lambda: None, found


@pytest.mark.parametrize("kernel", ["pages"], indirect=True)
@pytest.mark.parametrize("broken", [Broken, Stale])
def test_steps_that_cannot_be_recorded_are_computed_and_that_is_said_once(
    tiny_policy, kernel, broken, caplog
):
    with caplog.at_level("WARNING"):
        converse_by_steps(tiny_policy, broken())
    (told,) = (r.message for r in caplog.records if "CUDA graphs" in r.message)
    assert "capturing)." in told or "a replayed step is off by" in told
    assert "model.engine.cuda_graphs to false" in told


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("decode_weights", ["adapter", "merged"])
@pytest.mark.parametrize("quantization", ["none", "nf4"])
def test_a_gpu_samples_by_its_kernel_and_by_graphs_what_the_learner_computes(
    tiny_model, quantization, decode_weights
):
    policy = Policy(str(tiny_model), quantization, Lora(r=4), dtype="bfloat16")
    policy.load("cuda")
    policy.to("cuda")
    move(policy, 1)
    prompts = [[n + 1] * (3 + 9 * n) for n in range(7)]
    forced = [tuple(range(50, 60 + 7 * n)) for n in range(7)]

    def logprobs(**options):
        engine = started(policy, 256, kv_memory="64MB", decode_weights=decode_weights, **options)
        assert engine.pool.kernel is not None  # what was tried, and why not, is in the log

        async def scenario():
            found = await together(
                *(
                    engine.open(prompt).generate([], Sampling(len(ids), forced_ids=ids))
                    for prompt, ids in zip(prompts, forced, strict=True)
                )
            )
            replayed = [step for step in engine.decoder.steps.values() if step.replay]
            await engine.drain()
            return torch.tensor([p for f in found for p in f.logprobs]), len(replayed)

        return run(scenario())

    (plain, none), (replayed, some) = logprobs(cuda_graphs=False), logprobs()
    assert none == 0
    assert some > 2
    assert torch.allclose(plain, replayed, atol=1e-2)
    rows = [
        ([*p, *ids], [False] * len(p) + [True] * len(ids))
        for p, ids in zip(prompts, forced, strict=True)
    ]
    learnt = torch.cat([found[0] for found in policy.read(rows, 10_000)])
    # of some 20 nats each; bfloat16 alone makes a tenth of a nat
    assert (plain - learnt).abs().mean() < 0.25
