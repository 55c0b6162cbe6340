"""The check that any engine has to pass: `Slots` passes, and engines that are broken on purpose are
caught."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import pytest

from engines import PAGE_BYTES, falling_back, model
from turnrl.engines import Engine, Session
from turnrl.testing import check_engine
from turnrl_slots import Slots

__all__ = ["falling_back", "model"]  # fixtures


def test_the_engine_keeps_to_the_contract(tiny_policy):
    check_engine(Slots().build(), tiny_policy)
    check_engine(Slots(slots=1, prefill_tokens=8).build(), tiny_policy, temperature=0.7)
    check_engine(Slots(kv_memory=f"{2 * PAGE_BYTES / 1e3}KB").build(), tiny_policy)


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
    check_engine(Slots(slots=3).build(), model(name, **options))


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
        self.slots, self.session, self.seeded = Slots().build(), session, seeded

    def start(self, policy, max_tokens):
        self.tokenizer = policy.tokenizer
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


class StopsAtTheEndOfATokenAlone(Around):
    """Stops where the text ends in a stop string, as an engine that looks for `text.endswith`."""

    async def generate(self, new_ids, sampling):
        turn = await self.inner.generate(new_ids, sampling)
        text = self.engine.tokenizer.decode(list(turn.token_ids))
        if turn.reason == "stop" and not text.endswith(sampling.stop):
            return replace(turn, reason="length")
        return turn


class MissesBytes(Around):
    """Knows a stop string by the names of tokens, and so not in the token of a byte."""

    async def generate(self, new_ids, sampling):
        if any(i in self.engine.tokenizer.of_bytes for i in sampling.forced_ids):
            sampling = replace(sampling, stop=())
        return await self.inner.generate(new_ids, sampling)


class IgnoresEnds(Around):
    async def generate(self, new_ids, sampling):
        return await self.inner.generate(new_ids, replace(sampling, end_ids=()))


class DropsTheLastToken(Around):
    async def generate(self, new_ids, sampling):
        turn = await self.inner.generate(new_ids, sampling)
        return replace(turn, token_ids=turn.token_ids[:-1])


class LogprobsOfNothing(Around):
    async def generate(self, new_ids, sampling):
        turn = await self.inner.generate(new_ids, sampling)
        return replace(turn, logprobs=(0.0,) * len(turn.logprobs))


class LogprobsWorseTurnByTurn(Around):
    async def generate(self, new_ids, sampling):
        turn = await self.inner.generate(new_ids, sampling)
        return replace(turn, logprobs=tuple(p - 0.1 * bool(new_ids) for p in turn.logprobs))


class IgnoresForced(Around):
    async def generate(self, new_ids, sampling):
        return await self.inner.generate(new_ids, replace(sampling, forced_ids=()))


class CannotForce(Around):
    async def generate(self, new_ids, sampling):
        if sampling.forced_ids:
            raise NotImplementedError("no forced tokens")
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
        turn = await self.inner.generate(new_ids, sampling)
        self.inner = self.engine.slots.open([*self.prompt, *turn.token_ids[:-1], 7])
        return turn


def test_the_engine_keeps_to_the_contract_where_a_vocabulary_falls_back_to_bytes(falling_back):
    check_engine(Slots().build(), falling_back)
    message = r"does not stop at '!' in the token 36 \('!'\): Completion"
    with pytest.raises(AssertionError, match=message):
        check_engine(Wrapped(MissesBytes), falling_back)


def test_wrapped_engines_pass_even_without_seeds_or_forced_tokens(tiny_policy):
    check_engine(Wrapped(), tiny_policy)
    check_engine(Wrapped(IgnoresTheSeed, seeded=False), tiny_policy)
    check_engine(Wrapped(CannotForce), tiny_policy)


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        (
            Wrapped(ForgetsNewIds),
            r"Wrapped, .* continues \[.*\] and \[1.*\] with .*but the same history",
        ),
        (Wrapped(ForgetsTheTurnsWhenForked), r"continues \[.*\] and \[99\] with"),
        (Wrapped(GivesTokensBack), r"continues \[.*\] and \[1.*\] with"),
        (Wrapped(IgnoresStops), r"does not stop at '.'"),
        (
            Wrapped(StopsAtTheEndOfATokenAlone),
            r"does not stop at '.' in the token \d+ \('\S\S+'\): Completion",
        ),
        (Wrapped(IgnoresEnds), r"does not end at the token \d+"),
        (Wrapped(IgnoresForced), r"was to take \(\d+, \d+, \d+\), and gave"),
        (HoldsTwo(), r"asked to continue 4 sessions at once, gives .* alone"),
        (Wrapped(DropsTheLastToken), "asked for 6 tokens, and gave"),
        (Wrapped(LogprobsWorseTurnByTurn), r"continues \[.*\] and \[1.*\] with"),
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
            lambda *w: w[0] == "generate" and w[1] == [15],
            r"continue \[7, 7, .*\], then with \[15\] or, fo",
        ),
        (
            lambda *w: w[0] == "generate" and w[2].end_ids,
            r"continue \[5, 9, 33, 71\] with .*end_ids=\(\d",
        ),
        (lambda *w: w == ("session.close",), "a session of Failing, closed or cancelled, raised"),
        (lambda *w: w == ("sync", 2), "Failing, after a second sync, raised"),
        (lambda *w: w == ("close",), r"^Failing\.close\(\), called twice, raised"),
    ],
)
def test_the_step_at_which_an_engine_raises_is_reported(tiny_policy, fails, message):
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
