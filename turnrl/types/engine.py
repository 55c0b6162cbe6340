"""The contract between the rollouts and whatever samples tokens, and between both and the model."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from turnrl.plugins import contract
from turnrl.types.trajectory import Message, TokenRow

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Surroundings:
    """Where an engine works.

    Args:
        folder: The folder of the run, in which an engine may keep a log. None where there is no
            run, or one that writes no files.
        processes: Processes that learn together, each with an engine. All of them call
            `Engine.check` at the same time.
        divided: Whether these processes share one policy. Then all of them call `Engine.sync` at
            the same time, and it may make calls that take all of them.
    """

    folder: Path | None = None
    processes: int = 1
    divided: bool = False


class Beside(NamedTuple):
    """Memory of the learner's GPU that an engine's own processes take.

    Args:
        sampling: Bytes while it samples.
        learning: Bytes after `Engine.rest`.
    """

    sampling: int
    learning: int


@dataclass(frozen=True)
class Sampling:
    """Settings to sample one turn.

    Args:
        max_tokens: The most tokens to sample; at least 1.
        temperature: Logits are divided by it; 0 takes the likeliest token.
        seed: Random stream of this turn. With an engine that is `seeded`, the same seed and history
            give the same tokens, whatever else is in the batch.
        stop: Strings that end the turn when the sampled text contains one.
        end_ids: Token ids that end the turn.
        forced_ids: Tokens to take in place of the first draws, for a replay or a measurement; their
            log-probabilities are the model's all the same. An engine that cannot take them raises
            NotImplementedError.
        top_k: Draw from that many of the likeliest tokens; 0 from all.
        min_p: Draw from tokens whose probability is at least this share of the likeliest's.
        top_p: Draw from the fewest likeliest tokens that `top_k` and `min_p` leave whose
            probabilities, of those left, add up to this. All three are judged at the temperature;
            log-probabilities are of what was drawn from; a greedy turn heeds none of them. An
            engine that cannot cut distributions raises NotImplementedError.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()
    top_k: int = 0
    min_p: float = 0.0
    top_p: float = 1.0

    @property
    def cuts_distribution(self) -> bool:
        """True if it draws from a part of the distribution."""
        return self.temperature > 0 and (self.top_k > 0 or self.min_p > 0 or self.top_p < 1)


@dataclass(frozen=True)
class Completion:
    """Tokens sampled in one turn.

    Args:
        token_ids: Sampled ids, an end-of-turn token included.
        logprobs: Log-probability of each under the distribution it was drawn from.
        reason: An end token (`end`), a stop string (`stop`), or `max_tokens` (`length`).
        version: Number of the weights that sampled them, as `Engine.sync` gave it; or one for each
            token, if the weights changed while they were sampled.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    reason: Literal["end", "stop", "length"]
    version: int | tuple[int, ...]


class Session(ABC):
    """One trajectory's history inside an engine. It generates one turn at a time."""

    @abstractmethod
    async def generate(self, new_ids: Sequence[int], sampling: Sampling) -> Completion:
        """Append `new_ids` after everything so far, then sample.

        Raises:
            RuntimeError: If the session is closed, generates already, was cancelled while it
                generated, or is older than the engine's last `sync`.
        """

    @abstractmethod
    def fork(self) -> Session:
        """A new session that shares everything so far: a group at its prompt,
        a branch at a turn."""

    @abstractmethod
    def close(self) -> None:
        """Free what the session holds. Closing twice is harmless."""


Attend = Callable[[int, "Tensor", "Tensor", "Tensor", float | None, int | None], "Tensor"]
"""Computes the attention of a forward pass over tokens that are laid out in a way of its own. Sent
along with `SampledPolicy.hidden(..., attend=...)`, in place of a mask.

    layer     its number, from 0
    query     (B, heads, T, D), with their positions rotated in
    key       (B, key-value heads, T, D), of the same tokens
    value     the same
    scale     of the scores; None for one over the root of D
    window    the furthest that a token of this layer sees, itself included; None for all

Returns (B, T, heads, D), the attention output of the pass's tokens in one layer.
"""


class TokenScores(NamedTuple):
    """A policy's numbers for N sampled tokens.

    Args:
        logprobs: (N,), log-probabilities; they carry the gradient.
        entropy: (N,), nats, of the distributions that the tokens were drawn from; no gradient.
        values: (N,), the critic's values before each token; zero without a critic.
    """

    logprobs: Tensor
    entropy: Tensor
    values: Tensor


class SampledPolicy(Protocol):
    """Acting policy, as far as an engine or a reward may use it; `turnrl.Policy` is one."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration, which needs no weights."""

    def load(self, device: torch.device | str = "cpu") -> PreTrainedModel:
        """The network, loaded if it was not."""

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor, **kwargs: Any
    ) -> Tensor:
        """Last hidden states, (B, T) -> (B, T, H). `attend`, an `Attend`, computes the attention
        where it is given; NotImplementedError if the model's code cannot take one."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., V), in float32."""

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """(T, V), on the CPU: logits after each of a text's T tokens, in eval mode."""

    def read(
        self, rows: Sequence[TokenRow], budget: int | None = None, temperature: float = 1.0
    ) -> Sequence[TokenScores]:
        """For each sequence the numbers of its N_i tokens that are asked for. In eval mode, without
        a gradient, on the CPU; at most so many tokens are computed at once (None: the recipe's
        `policy.minibatch_tokens`), but one sequence at least, and what sequences begin with in
        common is read once."""

    def reference(self) -> AbstractContextManager[None]:
        """Within it the policy is the one that training began from; it has to have an adapter."""

    def export(self, folder: str | Path) -> Path:
        """Write the adapter, or the whole model if there is none."""


class Sampler(ABC):
    """Generates the turns of trajectories. Extend `Engine` or `MessageSampler`, not this.

    Attributes:
        capacity: How many trajectories it can serve at once; None for any number. A caller that can
            wait begins no more than these.
    """

    capacity: int | None = None

    @abstractmethod
    async def drain(self) -> None:
        """Wait until nothing is being sampled (turns that were cancelled may still be under way),
        and give back what only sampling needs: memory, connections."""


@dataclass(frozen=True)
class Reply:
    """Text of one turn from a sampler of messages.

    Args:
        text: The text. It ends with the stop string, if one ended it.
        cut: Whether `max_tokens` ended it.
    """

    text: str
    cut: bool = False


class MessageSampler(Sampler):
    """Turns chat messages into the text of the next turn: the door for somebody else's model behind
    an endpoint. Its trajectories have no tokens (no `samples`), so they can be scored and
    never trained on. `Rollout.play` takes one in the place of an engine."""

    @abstractmethod
    async def reply(self, messages: Sequence[Message], sampling: Sampling) -> Reply:
        """Sample the next turn. Many are asked for at once, from one event loop.

        Args:
            messages: The conversation so far, of roles `system`, `user` and `assistant`; the last
                one is the user's.
            sampling: How to sample; there are no `end_ids`, and the seed need not be heeded.
        Raises:
            TurnRLError: If the model cannot be reached, or refuses.
        """


@contract("turnrl_engines")
class Engine(Sampler):
    """Turns token ids into more token ids. Its options are its own; its life is

        start -> (sync -> (open, generate ... -> drain) for every collection -> rest) ... -> close

    Attributes:
        seeded: Whether the same seed and history give the same tokens. An engine that cannot
            promise it says so.
        cuts_distributions: Whether it can draw from a part of the distribution, as `top_k`, `min_p`
            and `top_p` ask. If not, a recipe that sets one of them is refused.
        keeps: Of how many versions of the weights it can sample at a time. One that keeps several
            has copies of its own: it samples while the policy learns, and a session goes on with
            the weights that it began with, or newer ones, as long as they are among the newest
            `keeps`.
        capacity: How many sessions it can hold at once, known once it has started. It may grow
            while a collection shows how much of `max_tokens` they need. The engine serves more, but
            has to read their histories again.
        copies_weights: Whether it samples with a copy that `sync` makes, and never with the
            policy's own network. Only then may a policy be divided over processes (FSDP2).
        importance_cap: `objective.importance_cap` where a recipe gives none. An engine sets it if
            its log-probabilities are not quite the learner's, because it computes them with other
            programs. A recipe that wants no correction gives a large number.
        memory_setting: The recipe's setting of the memory that it samples with, such as
            `model.engine.kv_memory`. Messages tell you to raise it for more sessions, and to lower
            it if a GPU's memory runs out. None names no setting.
    """

    seeded: bool = True
    cuts_distributions: bool = True
    keeps: int = 1
    copies_weights: bool = False
    importance_cap: float | None = None
    memory_setting: str | None = None

    def check(
        self, policy: SampledPolicy, max_tokens: int, where: Surroundings = Surroundings()
    ) -> None:
        """Verify that the engine can work, as far as that shows before any weights are loaded.

        Args:
            policy: Its tokenizer and configuration are there, its weights are not.
            max_tokens: As in `start`.
            where: Where it will work.
        Raises:
            RecipeError: Naming the setting, and the next step.
        """

    @property
    def in_force(self) -> Mapping[str, str]:
        """The choices that the engine made when it started, for people to read: which attention,
        with CUDA graphs or without. Empty before it starts."""
        return {}

    def beside(self, total: int) -> Beside | None:
        """What processes of its own will take of the learner's GPU, for the memory plan.

        Args:
            total: Bytes of that GPU.
        Returns:
            The bytes; None if that is not known.
        """
        return None

    def rehearsal(self) -> AbstractContextManager[Engine]:
        """What `turnrl doctor` samples a small model with in place of this engine: by default the
        engine itself, which is closed afterwards. Override it if it would take a run's memory.

        Returns:
            A context that gives an engine which samples in the same way.
        """
        return contextlib.nullcontext(self)

    @abstractmethod
    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """Get ready to sample a policy whose weights are loaded.

        Args:
            policy: Whose weights act.
            max_tokens: The longest history, prompt included, that a session will have.
        Raises:
            RecipeError: If the engine cannot sample this policy faithfully.
        """

    @abstractmethod
    def sync(self, version: int) -> None:
        """Act with the policy's weights as they are now. It is called before the first session, and
        again when the weights have changed. Sessions opened before must not go on, unless the
        engine `keeps` the weights that they began with: what they remember was computed with those.
        If it keeps several, this may be called while older sessions generate on the event loop's
        thread, and `drain` is not called, because another collection may be under way.

        Args:
            version: Number of optimiser steps behind the weights.
        """

    @abstractmethod
    def open(self, prompt_ids: Sequence[int]) -> Session:
        """A session whose history is the prompt, at least one token; forks share the work of
        reading it. Sessions may generate concurrently, from one event loop."""

    def rest(self) -> None:
        """Nothing is sampled until the next `sync`, because the policy learns: give back memory
        that it may need. A run that samples ahead (`model.max_staleness`) never calls this."""

    @abstractmethod
    def close(self) -> None:
        """Give back everything. Closing twice is harmless; `start` may follow."""
