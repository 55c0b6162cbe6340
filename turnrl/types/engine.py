"""The contracts between the rollouts, whatever samples their tokens, and the model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from turnrl.plugin.hooks import contract
from turnrl.types.trajectory import Message, TokenRow

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class RunContext:
    """The run that an engine works in: its folder and its processes.

    Args:
        folder: The run's folder, where an engine may keep a log. None if there is no run, or if the
            run writes no files.
        processes: Number of processes that learn together, each with an engine. All of them call
            `Engine.check` at the same time.
        divided: True if these processes share one policy. Then all of them call `Engine.sync` at
            the same time, and it may make collective calls.
    """

    folder: Path | None = None
    processes: int = 1
    divided: bool = False


class ServerMemory(NamedTuple):
    """GPU memory that an engine's own processes take on the learner's device.

    Args:
        sampling: Bytes while it samples.
        learning: Bytes after `Engine.release_memory`.
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
            log-probabilities are still the model's. An engine that cannot take them raises
            NotImplementedError.
    """

    max_tokens: int
    temperature: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Completion:
    """Tokens sampled in one turn.

    Args:
        token_ids: Sampled ids, an end-of-turn token included.
        logprobs: Log-probability of each under the distribution it was drawn from.
        reason: Why it ended: an end token (`end`), a stop string (`stop`), or `max_tokens`
            (`length`).
        version: Number of the weights that sampled the tokens, as `Engine.sync` gave it; or one
            number per token, if the weights changed while they were sampled.
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
            RuntimeError: If the session is closed, is already generating, was cancelled while it
                generated, or is older than the engine's last `sync`.
        """

    @abstractmethod
    def fork(self) -> Session:
        """A new session that shares the history so far: the prompt of a group, or the turns before
        a branch."""

    @abstractmethod
    def close(self) -> None:
        """Free what the session holds. Closing twice is harmless."""


Attend = Callable[[int, "Tensor", "Tensor", "Tensor", float | None, int | None], "Tensor"]
"""Computes the attention of a forward pass whose tokens the caller has laid out in its own way.
Passed to `SampledPolicy.hidden(..., attend=...)`, in place of a mask.

    layer     its number, from 0
    query     (B, heads, T, D), after the rotary position embedding
    key       (B, key-value heads, T, D), of the same tokens
    value     as key
    scale     factor of the scores; None for 1 / sqrt(D)
    window    number of tokens that a token of this layer sees, itself included; None for all

Returns (B, T, heads, D), the attention output of the forward pass's tokens in one layer.
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
    """The part of the acting policy that engines and rewards may use. `LanguageModel` is
    one."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer."""

    @property
    def config(self) -> PretrainedConfig:
        """The model's configuration, which needs no weights."""

    def load(self, device: torch.device | str = "cpu") -> PreTrainedModel:
        """The network, loaded if it has not been yet."""

    def hidden(
        self, input_ids: Tensor, attention_mask: Tensor | None, position_ids: Tensor, **kwargs: Any
    ) -> Tensor:
        """Last hidden states, (B, T) -> (B, T, H). If you pass `attend`, an `Attend`, it computes
        the attention; NotImplementedError if the model's code cannot take one."""

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., V), in float32."""

    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """(T, V), on the CPU: logits after each of a text's T tokens, in eval mode."""

    def score_tokens(
        self, rows: Sequence[TokenRow], budget: int | None = None, temperature: float = 1.0
    ) -> Sequence[TokenScores]:
        """For each sequence, the scores of the N_i tokens asked for, in eval mode, without a
        gradient, on the CPU. At most `budget` tokens are computed at once (None: the recipe's
        `policy.minibatch_tokens`), but at least one sequence. Shared prefixes are read once."""

    def reference(self) -> AbstractContextManager[None]:
        """A context in which the policy is the one that training began from. It needs an
        adapter."""

    def export(self, folder: str | Path) -> Path:
        """Write the adapter, or the whole model if there is no adapter."""


class Sampler(ABC):
    """Generates the turns of trajectories. Extend `Engine` or `MessageSampler`, not this.

    Attributes:
        capacity: Trajectories that it can serve at once; None for any number. A caller that can
            wait begins no more than that.
    """

    capacity: int | None = None

    @abstractmethod
    async def drain(self) -> None:
        """Wait until nothing is being sampled (cancelled turns may still be under way), and release
        what only sampling needs: memory, connections."""


@dataclass(frozen=True)
class Reply:
    """Text of one turn from a sampler of messages.

    Args:
        text: The text. If a stop string ended it, the text ends with that string.
        cut: True if `max_tokens` ended it.
    """

    text: str
    cut: bool = False


class MessageSampler(Sampler):
    """Turns chat messages into the text of the next turn: the way to use somebody else's model
    behind an endpoint. Its trajectories have no tokens (no `samples`), so they can be scored but
    never trained on. `Rollout.play` takes one in place of an engine."""

    @abstractmethod
    async def reply(self, messages: Sequence[Message], sampling: Sampling) -> Reply:
        """Sample the next turn. Many are asked for at once, from one event loop.

        Args:
            messages: The conversation so far, of roles `system`, `user` and `assistant`; the last
                one is the user's.
            sampling: How to sample. There are no `end_ids`, and the seed may be ignored.
        Raises:
            TurnRLError: If the model cannot be reached, or refuses.
        """


@contract("turnrl_engines")
class EngineSettings(ABC):
    """Settings of an engine, as a recipe writes them. A subclass is a frozen dataclass of plain
    values, in a module that imports no torch. Before a run builds the engine, a memory plan may
    replace the settings that the recipe leaves open."""

    @abstractmethod
    def build(self) -> Engine:
        """An engine with these settings. It takes memory only once it starts."""

    def for_rehearsal(self) -> EngineSettings:
        """Settings with which `turnrl doctor` samples a small model: by default these. Override it
        if the engine would take a run's memory."""
        return self


class Engine(Sampler):
    """Turns token ids into more token ids. A recipe names its `EngineSettings`. Its methods are
    called in this order:

    start -> (sync -> (open, generate ... -> drain) per collection -> release_memory) ... -> close

    Attributes:
        seeded: True if the same seed and history always give the same tokens. Set it to False if
            your engine cannot promise that.
        keeps: Number of versions of the weights that it can sample with at a time. An engine that
            keeps several has its own copies: it samples while the policy learns, and a session
            continues with the weights that it began with, or newer ones, as long as they are among
            the newest `keeps`.
        capacity: Sessions that it can hold at once, known once it has started. It may grow while a
            collection shows how much of `max_tokens` they need. The engine serves more sessions
            than that, but has to read their histories again.
        copies_weights: True if it samples with a copy that `sync` makes, and never with the
            policy's own network. Only then may a policy be divided over processes (FSDP2).
        approximates: True if its log-probabilities differ slightly from the learner's, because it
            computes them with other programs. Objectives then correct for the difference
            (`importance_cap`), unless a recipe turns that off.
        memory_setting: The recipe's setting for the memory that it samples with, such as
            `model.engine.kv_memory`. Messages advise raising it for more sessions, and lowering it
            if a GPU's memory runs out. None if there is no such setting.
    """

    seeded: bool = True
    keeps: int = 1
    copies_weights: bool = False
    approximates: bool = False
    memory_setting: str | None = None

    @property
    def name(self) -> str:
        """The engine's name in messages."""
        return type(self).__name__

    def check(
        self, policy: SampledPolicy, max_tokens: int, where: RunContext = RunContext()
    ) -> None:
        """Verify that the engine can work, as far as possible before any weights are loaded.

        Args:
            policy: Its tokenizer and configuration are there, its weights are not.
            max_tokens: As in `start`.
            where: Where it will work.
        Raises:
            RecipeError: Naming the setting, and the next step.
        """

    @property
    def active_choices(self) -> Mapping[str, str]:
        """The choices that the engine made when it started, for people to read: the kind of
        attention, with or without CUDA graphs. Empty before it starts."""
        return {}

    def server_memory(self, total: int) -> ServerMemory | None:
        """Memory of the learner's GPU that the engine's own processes will take, for the memory
        plan.

        Args:
            total: Bytes of that GPU.
        Returns:
            The bytes; None if they are not known.
        """
        return None

    @abstractmethod
    def start(self, policy: SampledPolicy, max_tokens: int) -> None:
        """Get ready to sample a policy whose weights are loaded.

        Args:
            policy: The policy whose weights act.
            max_tokens: The longest history, prompt included, that a session will have.
        Raises:
            RecipeError: If the engine cannot sample this policy faithfully.
        """

    @abstractmethod
    def sync(self, version: int) -> None:
        """Act with the policy's weights as they are now. Called before the first session, and again
        when the weights have changed. Sessions opened earlier must not continue, because the old
        weights computed their caches, unless the engine still `keeps` those weights. If it keeps
        several, this may be called while older sessions generate on the event loop's thread, and
        `drain` is not called, because another collection may be under way.

        Args:
            version: Number of optimiser steps behind the weights.
        """

    @abstractmethod
    def open(self, prompt_ids: Sequence[int]) -> Session:
        """A session whose history is the prompt, at least one token. Its forks share the work of
        reading the prompt. Sessions may generate concurrently, from one event loop."""

    def release_memory(self) -> None:
        """Release memory that the learner may need: nothing is sampled until the next `sync`. A run
        that samples ahead (`model.max_staleness`) never calls this."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Closing twice is harmless; `start` may follow."""
