"""An engine: what samples the policy."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch

from turnrl import Sampling
from turnrl.engines import Completion, Engine, EngineSettings, SampledPolicy, Session


@final
@dataclass(frozen=True)
class ExampleEngine(EngineSettings):
    """Samples with the policy's own weights, in this process.

    For every token the policy reads the whole history of one session again. This is slow, but you
    can compare a faster engine with it.
    """

    # options of your engine are fields here, and a recipe sets them

    def build(self) -> "PlainEngine":
        return PlainEngine()


@final
class PlainEngine(Engine):
    """The engine that these settings describe."""

    def __init__(self) -> None:
        self.version = 0  # of the weights, in optimiser steps
        self.turns = 0  # the number being sampled

    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        # this engine caches nothing, so it needs no memory for `max_tokens`
        self.policy = policy

    def sync(self, version: int) -> None:
        # the weights are the policy's own; a remote engine would receive a copy here
        self.version = version

    def open(self, prompt_ids: Sequence[int]) -> Session:
        return _History(self, prompt_ids)

    async def drain(self) -> None:
        while self.turns:
            await asyncio.sleep(0)

    def close(self) -> None:
        self.version = -1  # `start` may follow, with another policy

    async def sample(self, history: Sequence[int], sampling: Sampling) -> Completion:
        """The turn that comes after a history."""
        ids: tuple[int, ...] = ()
        logprobs: tuple[float, ...] = ()
        reason: Literal["end", "stop", "length"] = "length"
        # a separate random stream, so that other turns make no difference
        rng = torch.Generator().manual_seed(sampling.seed)
        self.turns += 1
        try:
            while reason == "length" and len(ids) < sampling.max_tokens:
                await asyncio.sleep(0)  # lets tools and other turns run; a cancelled turn ends here
                log_p = self.log_p([*history, *ids], sampling.temperature or 1.0)
                drawn = torch.multinomial(log_p.exp(), 1, generator=rng)
                token = int(drawn if sampling.temperature else log_p.argmax())
                ids, logprobs = (*ids, token), (*logprobs, float(log_p[token]))
                text = self.policy.tokenizer.decode(list(ids))  # a stop string may span tokens
                if token in sampling.end_ids:
                    reason = "end"
                elif any(stop in text for stop in sampling.stop):
                    reason = "stop"
        finally:
            self.turns -= 1
        return Completion(ids, logprobs, reason, self.version)

    @torch.inference_mode()
    def log_p(self, ids: Sequence[int], temperature: float) -> torch.Tensor:
        """(V,), the log-probability of each token that may come after `ids`."""
        network = self.policy.load()
        read = torch.tensor([ids], device=next(network.parameters()).device)
        positions = torch.arange(len(ids), device=read.device)[None]
        # Without dropout, and then back to the mode of training. For each token anew, because the
        # first turn to end would otherwise switch the mode for the others.
        was_training = network.training
        network.eval()
        try:
            hidden = self.policy.hidden(read, None, positions)
            logits = self.policy.logits(hidden[0, -1])
        finally:
            network.train(was_training)
        return (logits / temperature).log_softmax(-1).cpu()  # where the generator is


class _History(Session):
    """The token ids read and sampled so far."""

    def __init__(self, engine: PlainEngine, ids: Sequence[int]) -> None:
        self.engine, self.ids, self.version = engine, list(ids), engine.version
        self.busy = self.closed = False

    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        self.check()
        if sampling.forced_ids:
            raise NotImplementedError("cannot force tokens")
        self.busy = True
        completion = await self.engine.sample([*self.ids, *new_ids], sampling)
        # a cancelled turn never gets here: its session stays busy, because its tokens are lost
        self.busy = False
        self.ids += [*new_ids, *completion.token_ids]
        return completion

    def fork(self) -> Session:
        self.check()
        return _History(self.engine, self.ids)

    def close(self) -> None:
        self.closed = True
        self.ids = []

    def check(self) -> None:
        """Refuse a history that is incomplete, or that older weights have sampled."""
        if self.closed or self.busy:
            raise RuntimeError("the session is closed, or its turn was cancelled or is not done")
        if self.version != self.engine.version:
            raise RuntimeError("the weights have changed since: open a new session")
