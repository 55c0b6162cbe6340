"""The memory of keys and values: its bound, whose pages are whose, and what is read once."""

from __future__ import annotations

import asyncio
import os

import pytest
import torch

from conftest import greedy_reference
from engines import GREEDY, PAGE_BYTES, PROMPTS, Watched, run, started, together
from turnrl import Policy, RecipeError, Sampling
from turnrl.plugin.errors import parse_bytes
from turnrl_slots import Slots
from turnrl_slots.sizes import PAGE


@pytest.mark.parametrize("text", ["4 PB", "0GB"])
def test_a_kv_memory_that_is_not_a_size_is_refused(text):
    with pytest.raises(RecipeError, match=r"kv_memory is '.*'; give 'auto', or a size"):
        Slots(kv_memory=text)


def test_a_memory_has_a_unit_and_auto_is_the_same_each_time(tiny_policy):
    assert parse_bytes("1.5GB", "it") == 1_500_000_000
    assert parse_bytes(" 512 MiB", "it") == 512 * 2**20
    first, second = started(tiny_policy), started(tiny_policy)
    assert first.capacity == second.capacity > 1000
    assert first.pool.bytes < 0.26 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_a_trajectory_too_large_for_memory_is_refused_before_sampling(tiny_policy):
    message = (
        r"kv_memory is '50KB': room for 96 tokens of 512 bytes each.*max_tokens = 100 takes 0\.1 MB"
    )
    with pytest.raises(RecipeError, match=message):
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
            turns = []
            for turn in range(3):
                completion = await session.generate([n] * 9 * turn, Sampling(9, seed=10 * n + turn))
                turns.append(completion.token_ids)
                assert engine.pool.bytes <= 10 * PAGE_BYTES or kv_memory == "auto"
            branch = session.fork()
            turns.append((await branch.generate([5], Sampling(9, seed=n))).token_ids)
            return turns

        sampled = run(together(*map(converse, range(12))))
        return engine, sampled, sum(tokens for _, tokens in policy.read)

    _, sampled, read_again = texts(f"{10 * PAGE_BYTES / 1e3}KB")
    _, wanted, read = texts("auto")
    assert sampled == wanted
    assert read_again > 1.2 * read


def test_a_reused_page_is_not_matched_by_its_old_successors(tiny_policy):
    # two texts whose first pages differ and lie in the same place, one after the other, and whose
    # second pages have the same tokens: what these are depends on what came before
    tokens = [(11 * i) % 300 for i in range(50)]
    engine = started(tiny_policy, 128, kv_memory=f"{4 * PAGE_BYTES / 1e3}KB")
    for first in (5, 6):

        async def scenario(first=first):
            session = engine.open([first])
            rest_of_page = (*tuple(first * i % 300 for i in range(PAGE - 1)), 9)
            await session.generate([], Sampling(PAGE, forced_ids=rest_of_page))
            completion = await session.generate(tokens, Sampling(3, seed=1))
            session.close()
            return [first, *rest_of_page, *tokens], completion

        history, completion = run(scenario())
        row = ([*history, *completion.token_ids], [False] * len(history) + [True] * 3)
        ((logprobs, *_),) = tiny_policy.score_tokens([row], 1000)
        assert torch.allclose(logprobs, torch.tensor(completion.logprobs), atol=1e-4)


@pytest.mark.parametrize("how", ["cancelled", "closed"])
def test_pages_are_freed_when_a_turn_is_cancelled_or_its_session_closed(tiny_policy, how):
    policy = Watched(tiny_policy)
    engine = started(policy)
    policy.read.clear()

    async def scenario():
        session, other = engine.open(PROMPTS[0]), engine.open(PROMPTS[1])
        turn = asyncio.create_task(session.generate([], Sampling(40, seed=1)))
        while not policy.read:
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


def test_a_page_that_no_other_session_needs_is_written_to_without_a_copy(tiny_policy):
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

    history, long, after_fork = run(scenario())
    assert list(after_fork.token_ids) == greedy_reference(tiny_policy, [*history, 9], 6)
    wanted = greedy_reference(tiny_policy, [*history, 7, 8], len(long.token_ids))
    assert list(long.token_ids) == wanted


def test_a_session_that_is_closed_while_it_is_sampled_keeps_its_pages_until_the_pass_is_over(
    tiny_policy,
):
    policy = Watched(tiny_policy)
    engine = started(policy, kv_memory=f"{4 * PAGE_BYTES / 1e3}KB")
    computing, go_on = policy.hold()

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


def test_unused_pages_of_a_turn_are_freed_and_raise_the_expected_capacity(tiny_policy):
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


def test_sessions_that_use_all_their_pages_do_not_lower_the_capacity(tiny_policy):
    engine = started(tiny_policy, 4 * PAGE, kv_memory=f"{16 * PAGE_BYTES / 1e3}KB")

    async def scenario():
        session = engine.open([5] * 10)
        await session.generate([], Sampling(4 * PAGE - 10, 0))
        left = engine.pool.available
        session.close()
        return left

    assert engine.capacity == 4
    assert run(scenario()) == 12
    assert engine.capacity == 4  # and not nine tenths of that


def test_no_session_gives_up_pages_for_a_turn_that_still_would_not_fit(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy, 5 * PAGE, kv_memory=f"{6 * PAGE_BYTES / 1e3}KB")

    async def scenario():
        idle, long, large = (engine.open([n] * PAGE) for n in (3, 4, 5))
        await idle.generate([], Sampling(2, seed=1))  # two pages
        policy.read.clear()
        busy = asyncio.create_task(long.generate([], Sampling(2 * PAGE, seed=2)))  # three pages
        while not policy.read:
            await asyncio.sleep(0.001)
        waits = asyncio.create_task(large.generate([], Sampling(3 * PAGE, seed=3)))  # four
        await asyncio.gather(busy, waits)
        # one pass after the other: what is read of `large` comes when `busy` has had all its tokens
        assert policy.read[2 * PAGE] == (1, PAGE)
        policy.read.clear()
        await idle.generate([7], Sampling(1, seed=1))
        return policy.read

    # the last token of the turn before, and the new one
    assert run(scenario()) == [(1, 2)]


def test_a_waiting_session_keeps_its_pages_and_an_idle_one_loses_them(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy, 4 * PAGE, kv_memory=f"{4 * PAGE_BYTES / 1e3}KB", slots=1)

    async def scenario():
        long, idle, waits = (engine.open([n] * PAGE) for n in (3, 4, 5))
        for session in (idle, waits):
            await session.generate([], Sampling(1, seed=1))  # a page each
        policy.read.clear()
        await together(  # three pages, of which two are free; and its turn comes after
            long.generate([], Sampling(2 * PAGE + 1, seed=2)),
            waits.generate([7], Sampling(1, seed=1)),
        )
        return policy.read

    first, *_, last = run(scenario())
    assert first == (1, PAGE)
    # the last token of the turn before, and the new one
    assert last == (1, 2)


def test_a_turn_without_room_waits_and_keeps_its_own_pages(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy, 4 * PAGE, kv_memory=f"{4 * PAGE_BYTES / 1e3}KB")

    async def scenario():
        busy, large = (engine.open([n] * PAGE) for n in (3, 4))
        await large.generate([], Sampling(1, seed=1))  # a page
        policy.read.clear()
        first = asyncio.create_task(busy.generate([], Sampling(PAGE, seed=2)))  # two pages
        while not policy.read:
            await asyncio.sleep(0.001)
        # two pages more: one is free, and it holds one
        async with asyncio.timeout(30):
            await asyncio.gather(first, large.generate([7], Sampling(PAGE, seed=3)))
        return policy.read

    # when `busy` has had all its tokens: the last token of the turn before, and the new one
    assert run(scenario())[PAGE] == (1, 2)


def test_a_turn_that_fits_the_free_pages_evicts_nothing(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy, 3 * PAGE, kv_memory=f"{3 * PAGE_BYTES / 1e3}KB")

    async def scenario():
        idle, other = engine.open([3] * 10), engine.open([4] * PAGE)
        await idle.generate([], Sampling(PAGE - 9, seed=1))  # fills a page
        assert engine.pool.available == 2
        await other.generate([], Sampling(PAGE + 1, seed=2))  # takes two
        other.close()
        policy.read.clear()
        await idle.generate([7], Sampling(1, seed=1))
        return policy.read

    assert run(scenario()) == [(1, 2)]


def test_forks_do_not_write_to_shared_pages(tiny_policy):
    # a page is partly filled when it is shared, and then each goes its own way, in any order
    engine = started(tiny_policy)

    async def scenario():
        root = engine.open(PROMPTS[3])
        shared = (await root.generate([], GREEDY)).token_ids
        branches = [root.fork() for _ in range(3)]
        first = await branches[1].generate([9], GREEDY)
        rest = await together(
            *(b.generate([9 + i], GREEDY) for i, b in enumerate([root, *branches[::2]]))
        )
        again = await branches[1].generate([8], GREEDY)
        for session in (root, *branches):
            session.close()
        assert engine.pool.available == engine.pool.count
        return shared, first, rest, again

    shared, first, rest, again = run(scenario())
    history = [*PROMPTS[3], *shared]
    assert list(first.token_ids) == greedy_reference(tiny_policy, [*history, 9], 12)
    for i, completion in enumerate(rest):
        assert list(completion.token_ids) == greedy_reference(tiny_policy, [*history, 9 + i], 12)
    longer = [*history, 9, *first.token_ids, 8]
    assert list(again.token_ids) == greedy_reference(tiny_policy, longer, 12)


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


def test_a_shared_prompt_prefix_is_read_once_for_all_questions(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy, 256)
    system = [(7 * i) % 300 for i in range(2 * PAGE + 5)]
    prompts = [[*system, *range(n, n + 4)] for n in range(4)]
    policy.read.clear()

    async def scenario():
        return await together(*(engine.open(p).generate([], GREEDY) for p in prompts))

    for prompt, completion in zip(prompts, run(scenario()), strict=True):
        assert list(completion.token_ids) == greedy_reference(tiny_policy, prompt, 12)
    # the first reads all of its prompt, and the others what is no full page of it
    assert policy.read[:2] == [(1, len(prompts[0])), (1, 1 + 3 * 9)]


def test_a_turn_that_continues_within_a_page_is_not_mistaken_for_a_page_start(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        session = engine.open([5] * 10)
        await session.generate([], Sampling(3, forced_ids=(1, 2, 6)))
        await session.generate([7, 8], GREEDY)  # reads 6, 7 and 8, as the page's tokens 12 to 14
        return await engine.open([6, 7, 9]).generate([], GREEDY)

    assert list(run(scenario()).token_ids) == greedy_reference(tiny_policy, [6, 7, 9], 12)


def test_the_end_of_a_cached_prefix_is_evicted_before_its_beginning(tiny_policy):
    policy = Watched(tiny_policy)
    engine = started(policy, 4 * PAGE, kv_memory=f"{4 * PAGE_BYTES / 1e3}KB")
    prompt = [(7 * i) % 300 for i in range(3 * PAGE + 1)]

    async def read(prompt, count):
        policy.read.clear()
        session = engine.open(prompt)
        await session.generate([], Sampling(count, seed=1))
        session.close()
        return policy.read[0]

    async def scenario():
        assert await read(prompt, 1) == (1, 3 * PAGE + 1)  # three pages are kept, and one is free
        await read([9] * 2, PAGE)  # takes two
        return await read(prompt, 1)

    assert run(scenario()) == (1, PAGE + 1)


@pytest.mark.parametrize(("prefill_tokens", "passes"), [(8, [8, 2 + 4]), (7, [4, 1 + 4, 2 + 4])])
def test_each_pass_reads_up_to_prefill_tokens_and_no_more(tiny_policy, prefill_tokens, passes):
    policy = Watched(tiny_policy)
    engine = started(policy, prefill_tokens=prefill_tokens)
    policy.read.clear()

    async def scenario():
        await together(*(engine.open([n] * 4).generate([], GREEDY) for n in (3, 4, 5)))

    run(scenario())
    assert policy.read[: len(passes)] == [(1, tokens) for tokens in passes]


def test_pages_are_forgotten_when_the_weights_change(tiny_model):
    policy = Policy(str(tiny_model)).build()
    engine = started(policy)
    prompt = [(7 * i) % 300 for i in range(2 * PAGE + 5)]
    before = run(engine.open(prompt).generate([], GREEDY))
    with torch.no_grad():
        policy.load().get_input_embeddings().weight.mul_(-1)
    engine.sync(1)
    after = run(engine.open(prompt).generate([], GREEDY))
    assert list(after.token_ids) == greedy_reference(policy, prompt, 12)
    assert after.token_ids != before.token_ids


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


def test_a_session_continues_after_the_engine_released_its_memory(tiny_policy):
    engine = started(tiny_policy)

    async def scenario():
        session = engine.open(PROMPTS[0])
        first = (await session.generate([], GREEDY)).token_ids
        await engine.drain()
        assert not engine.pool.allocated
        return first, await session.generate([7], GREEDY)

    first, second = run(scenario())
    history = [*PROMPTS[0], *first, 7]
    assert list(second.token_ids) == greedy_reference(tiny_policy, history, 12)
