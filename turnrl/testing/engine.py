"""Check of an engine."""

from __future__ import annotations

import asyncio
import contextlib
import re

from turnrl.testing.contract import Breach, reporting_breaches, require
from turnrl.types.engine import Completion, Engine, SampledPolicy, Sampling, Session

_GREEDY = Sampling(6, 0.0)

_LONGER = re.compile(r"([!-~])(?:(?!\1)[!-~])+")
"""A token whose first character does not occur in the rest of it."""

_BYTE = re.compile("<0x(?:2[1-9A-F]|[3-6][0-9A-F]|7[0-9A-E])>")
"""A byte token of a printable character, in SentencePiece vocabularies."""


def check_engine(engine: Engine, policy: SampledPolicy, temperature: float = 1.0) -> None:
    """Check an engine on a policy: exact appending, forks, endings, forced tokens, more
    sessions at once than its capacity, seeds, closing, cancelling, versions, and that old sessions
    end at a sync.

    Args:
        engine: The engine, not started yet. It is closed at the end.
        policy: A small policy, built and loaded (`Policy(...).build().load()`).
        temperature: Sampling temperature.
    Raises:
        AssertionError: If a rule is broken, with the rule and the input.
    """
    name = engine.name
    try:
        with reporting_breaches(f"{name}.start(policy, 64), and sync(1) after it,"):
            engine.start(policy, 64)
            engine.sync(1)
            holds = engine.capacity
            require(holds is None or holds >= 1, f"holds {holds} sessions: give None or a number")
        asyncio.run(_Trial(engine, policy, temperature).run())
    finally:
        with reporting_breaches(f"{name}.close(), called twice,"):
            engine.close()
            engine.close()


class _Trial:
    """A started engine, with a method for each promise that it has to keep."""

    def __init__(self, engine: Engine, policy: SampledPolicy, heat: float) -> None:
        self.engine, self.policy, self.heat = engine, policy, heat
        self.name, self.prompt = engine.name, [5, 9, 33, 71]

    async def run(self) -> None:
        """Check one promise after another."""
        for history, new in (([44, 2], [12, 13, 14]), ([7] * 12, [15]), (self.prompt, [11])):
            ids = await self.appends_exactly(history, new)
        await self.serves_more_than_it_holds()
        await self.ends_turns(ids)
        likely = (await self.sample(_GREEDY)).token_ids
        await self.takes_forced_tokens(likely)
        await self.stops_within_tokens()
        drawn = [await self.sample(Sampling(6, self.heat, n)) for n in (1, *range(1, 10))]
        self.gives_log_probabilities(drawn[0])
        self.heeds_seeds([sample.token_ids for sample in drawn])
        await self.refuses_after_the_end()
        await self.forgets_at_a_sync()

    async def sample(self, sampling: Sampling) -> Completion:
        """A turn after the prompt."""
        with reporting_breaches(f"{self.name}, asked to continue {self.prompt} with {sampling},"):
            return await self.engine.open(self.prompt).generate([], sampling)

    async def if_able(self, sampling: Sampling) -> Completion | None:
        """A turn after the prompt; None if the engine says that it cannot sample in this way."""
        try:
            return await self.sample(sampling)
        except Breach as error:
            if isinstance(error.__cause__, NotImplementedError):
                return None
            raise

    async def appends_exactly(self, history: list[int], new: list[int]) -> tuple[int, ...]:
        """Check that a session and its fork each continue exactly their own tokens.

        Returns:
            The likeliest tokens after the history.
        """
        with reporting_breaches(
            f"{self.name}, asked to continue {history}, then with {new} or, forked, [99],"
        ):
            session = self.engine.open(history)
            first = await session.generate([], _GREEDY)
            whole = len(first.token_ids) == len(first.logprobs) == 6 and first.reason == "length"
            require(whole, f"was asked for 6 tokens, and gave {first!r}")
            branch, history = session.fork(), [*history, *first.token_ids]
            later = session.generate(new, _GREEDY), branch.generate([99], _GREEDY)
            for completion, appended in zip(await asyncio.gather(*later), (new, [99]), strict=True):
                wanted = await self.engine.open([*history, *appended]).generate([], _GREEDY)
                require(
                    _is_close(completion, wanted),
                    f"continues {history} and {appended} with {completion!r}, but the same history "
                    f"in a new session with {wanted!r}",
                )
        return first.token_ids

    async def serves_more_than_it_holds(self) -> None:
        """Check that more sessions than fit run at once, each with its own tokens."""
        many = min(self.engine.capacity or 0, 32) + 2
        with reporting_breaches(f"{self.name}, asked to continue {many} sessions at once,"):
            crowd = [self.engine.open([n + 1, *range(20, 60)]) for n in range(many)]
            begun = await asyncio.gather(*(s.generate([], _GREEDY) for s in crowd))
            after = await asyncio.gather(*(s.generate([7], _GREEDY) for s in crowd))
            for n, completion in enumerate(after[:3]):
                history = [n + 1, *range(20, 60), *begun[n].token_ids, 7]
                wanted = await self.engine.open(history).generate([], _GREEDY)
                require(
                    _is_close(completion, wanted), f"gives {completion!r}, and {wanted!r} alone"
                )

    async def ends_turns(self, ids: tuple[int, ...]) -> None:
        """Check that a turn ends at an end token, and with the token that completes a stop string.

        Args:
            ids: The likeliest tokens after the prompt.
        """
        ended = await self.sample(Sampling(6, 0.0, end_ids=(ids[3],)))
        right = ended.token_ids == ids[: ids.index(ids[3]) + 1] and ended.reason == "end"
        require(right, f"{self.name} does not end at the token {ids[3]}: {ended!r}")
        texts = [str(self.policy.tokenizer.decode(list(ids[: n + 1]))) for n in range(6)]
        stop = next((t[-1] for t in texts if t[-1:].isascii() and t[-1:].isprintable() and t), None)
        if stop is not None:
            stopped = await self.sample(Sampling(6, 0.0, stop=(stop,)))
            count = next(n for n, t in enumerate(texts, 1) if stop in t)
            right = stopped.token_ids == ids[:count] and stopped.reason == "stop"
            require(right, f"{self.name} does not stop at {stop!r}: {stopped!r}")

    async def takes_forced_tokens(self, likely: tuple[int, ...]) -> None:
        """Check that a turn begins with the forced tokens, unless the engine cannot force them."""
        ids = (likely[0], *likely[:2])
        forced = await self.if_able(Sampling(6, 0.0, forced_ids=ids))
        right = forced is None or forced.token_ids[:3] == ids
        require(right, f"{self.name} was to take {ids}, and gave {forced!r}")

    async def stops_within_tokens(self) -> None:
        """Check that a stop string ends a turn if a longer token contains it, and if it is a byte
        token, unless the engine takes no forced tokens."""
        tokenizer, special = self.policy.tokenizer, {*self.policy.tokenizer.all_special_ids}
        pieces = enumerate(tokenizer.convert_ids_to_tokens(list(range(len(tokenizer)))))
        plain = [(n, piece) for n, piece in pieces if piece and n not in special]
        longer = ((n, piece) for n, piece in plain if _LONGER.fullmatch(piece))
        of_bytes = ((n, chr(int(p[3:5], 16))) for n, p in plain if _BYTE.fullmatch(p))
        for kind in (longer, of_bytes):
            token, text = next(
                ((n, piece) for n, piece in kind if tokenizer.decode([n]) == piece), (0, "")
            )
            if text:
                sampling = Sampling(3, 0.0, stop=(text[0],), forced_ids=(token,))
                turn = await self.if_able(sampling)
                right = turn is None or (turn.token_ids, turn.reason) == ((token,), "stop")
                rule = f"{self.name} does not stop at {text[0]!r} in the token {token} ({text!r})"
                require(right, f"{rule}: {turn!r}")

    def gives_log_probabilities(self, sample: Completion) -> None:
        """Check a sample's log-probabilities against those of one plain pass of the policy."""
        import torch

        gave, ids, policy = sample.logprobs, sample.token_ids, self.policy
        read = torch.tensor([[*self.prompt, *ids]], device=next(policy.load().parameters()).device)
        with torch.no_grad():
            at = torch.arange(read.shape[1]).to(read)[None]
            hidden = policy.hidden(read, None, at)[0, len(self.prompt) - 1 : -1]
            log_p = (policy.logits(hidden) / self.heat).log_softmax(-1)
        own = [float(row[token]) for row, token in zip(log_p, ids, strict=True)]
        gap = max(abs(a - b) for a, b in zip(gave, own, strict=True))
        require(gap < 0.1, f"{self.name} gives log-probabilities {gave}; the policy's are {own}")

    def heeds_seeds(self, drawn: list[tuple[int, ...]]) -> None:
        """If the engine is seeded, check that equal seeds give equal samples, and others different
        ones."""
        kept = drawn[0] == drawn[1] and len(set(drawn)) > 1
        rule = f"{self.name} is seeded, but seeds 1, 1, 2, ... give {drawn}"
        require(kept or not self.engine.seeded, rule)

    async def refuses_after_the_end(self) -> None:
        """Check that a session samples no more after it was closed, or after a turn was
        cancelled."""
        with reporting_breaches(f"a session of {self.name}, closed or cancelled,"):
            closed, session = self.engine.open(self.prompt), self.engine.open(self.prompt)
            closed.close()
            closed.close()
            await _refuses(closed, "after close()")
            task = asyncio.ensure_future(session.generate([], Sampling(40, 0.0)))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            await self.engine.drain()
            if task.cancelled() or not task.result():
                await _refuses(session, "after a turn that was cancelled, of which it knows a part")

    async def forgets_at_a_sync(self) -> None:
        """Check that no session outlives a sync if only the newest weights are kept, and that the
        same weights sample as before."""
        with reporting_breaches(f"{self.name}, after a second sync,"):
            session = self.engine.open(self.prompt)
            before = await session.generate([], _GREEDY)
            self.engine.sync(2)
            if self.engine.keeps == 1:
                await _refuses(session, "on in a session that remembers older weights")
            else:
                later = (await session.generate([], _GREEDY)).version
                kept = {*(later if isinstance(later, tuple) else [later])} <= {1, 2}
                require(kept, f"gives version {later} in a session from before sync(2)")
            after = await self.engine.open(self.prompt).generate([], _GREEDY)
            versions = before.version, after.version
            require(versions == (1, 2), f"gives versions {versions} after sync(1) and sync(2)")
            require(
                _is_close(before, after), f"with the same weights, gives {before!r} and {after!r}"
            )
            await self.engine.drain()


def _is_close(first: Completion, second: Completion) -> bool:
    """True if two completions differ only by rounding, which depends on the batch."""
    gaps = (abs(a - b) for a, b in zip(first.logprobs, second.logprobs, strict=True))
    return first.token_ids == second.token_ids and max(gaps) < 0.05


async def _refuses(session: Session, why: str) -> None:
    """Check that a session samples no more."""
    with contextlib.suppress(RuntimeError):
        await session.generate([], _GREEDY)
        require(False, f"generates {why}")
