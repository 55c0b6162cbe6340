"""The contracts of acting that a plugin extends: tools, segmenters, players."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from turnrl.plugin.errors import RecipeError, TrajectoryLost
from turnrl.plugin.hooks import contract
from turnrl.types.engine import Reply
from turnrl.types.questions import Question
from turnrl.types.sessions import ToolSession, ToolSpec
from turnrl.types.trajectory import Message, Reading, ToolCall, ToolResult, Turn


@contract("turnrl_tools")
class Toolset(ABC):
    """A set of tools that share a connection or a session. A `Tool` is a set of one.

    All trajectories share the set. If it keeps something for each of them, it also extends
    `Stateful`.

    Attributes:
        timeout_s: Seconds that a batch, or opening or closing a session, may take. The run stops if
            it takes longer.
        acts: True if a call changes the world, as a step of an environment does. Such a call is run
            even in the last turn, where nobody reads the reply: its reward still counts.
        capacity: Trajectories that it can serve at once, probes included, over all processes of the
            run; None for any number. No more sessions than that are ever open.
        figure_names: Names of the figures that its sessions may hand over. If two sets share a
            name, they are refused before anything runs.
    """

    timeout_s: float = 60.0
    acts: bool = False
    capacity: int | None = None
    figure_names: Sequence[str] = ()

    @property
    @abstractmethod
    def specs(self) -> Sequence[ToolSpec]:
        """The tools, always the same ones. They are first asked for after `start`, so a set may
        learn there what its server offers."""

    def __str__(self) -> str:
        return f"toolset {type(self).__name__}"

    @abstractmethod
    def run(
        self, calls: Sequence[ToolCall]
    ) -> Sequence[ToolResult | TrajectoryLost] | Awaitable[Sequence[ToolResult | TrajectoryLost]]:
        """Answer a batch of valid calls, in order.

        A plain method runs in a worker thread, several at once; an `async def` runs on the event
        loop. Calls that arrive within a few milliseconds of each other come as one batch,
        whichever tools of the set they call. Calls of one session come in order, and never in two
        batches at once.

        Args:
            calls: Calls whose name and arguments have been checked.
        Returns:
            One result per call. A mistake of the policy is a result with `ok=False`. If a
            `TrajectoryLost` stands in place of a result, only that attempt begins again.
        Raises:
            ToolError: If the world is broken. The run stops; the policy never sees it.
        """

    def check(self) -> None:  # noqa: B027 - optional: most tools need no check
        """Verify that the tools can work (server up, index present). Runs after `start`, before any
        model is loaded.

        Raises:
            ToolError: Naming what is missing, and the next step.
        """

    def check_questions(self, questions: Sequence[Question]) -> None:  # noqa: B027 - optional
        """Refuse questions that lack what a session begins with, such as a column. Runs with all
        questions of a split before any model is loaded.

        Raises:
            DataError: Naming a question, and what it lacks.
        """

    async def start(self) -> None:  # noqa: B027 - optional: most tools hold nothing
        """Open what all trajectories share: connections, child processes. Called once before
        anything else, on the event loop that `run` is called from, and before any model is loaded.

        Raises:
            ToolError: If the world is broken.
        """

    async def stop(self) -> None:  # noqa: B027 - optional: most tools hold nothing
        """Close what `start` opened. Called once, at the end of the run, however it ends; `start`
        may follow."""

    def rehearsal(self) -> AbstractContextManager[Toolset]:
        """The set that `turnrl doctor` checks and calls in place of this one: by default this one.
        Override it if a call changes the world, or if a run has to build something large first.

        Returns:
            A context that gives a set with the same `specs`, and removes whatever it made at its
            end.
        """
        return contextlib.nullcontext(self)


class Tool(Toolset):
    """Something the policy can call. Subclass it, set the three attributes, write `run`.

    Attributes:
        name: The name the policy calls it by.
        description: One sentence that the prompt shows to the policy.
        parameters: JSON Schema of the arguments object; calls are validated before `run` sees them.
        examples: Arguments of calls that work; see `ToolSpec`.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    examples: Sequence[Mapping[str, object]] = ()

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """The tool itself."""
        return (ToolSpec(self.name, self.description, self.parameters, self.examples),)

    def __str__(self) -> str:
        return f"tool {self.name!r} ({type(self).__name__})"


class Stateful(ABC):
    """Tools that open a session for each trajectory: `class Notes(Stateful, Tool)`, or
    `class Shop(Stateful, Toolset)`. Their `run` finds the session in `call.session`.

    Attributes:
        interruptible: True if `open`, a coroutine function, may be cancelled. It must then undo
            what it began. Otherwise it runs to its end, and its session is closed. Set it if `open`
            may take long, for example because it waits for a server.
    """

    interruptible: bool = False

    @abstractmethod
    def open(self, question: Question) -> ToolSession | Awaitable[ToolSession]:
        """Open a session. Called before the trajectory's prompt is rendered, in a worker thread or
        on the event loop like `run`."""


@contract("turnrl_segmenters")
class Segmenter(ABC):
    """Defines the turns: the prompt, where a turn stops, how its text is parsed, and how results
    are shown.

    Attributes:
        max_turns: K, the most turns a trajectory may take; at least 1.
        stop: Strings that end a turn as soon as the sampled text contains one.
        tags: Tag names with a meaning in this scheme; they are neutralised in questions and tool
            results.
        tools_in_template: True if the model's own chat template describes the tools (`tools=`);
            otherwise `prompt` does.
        opened_thought: The tag of the thought that the chat template has to open in each turn, such
            as `<think>`, so that the text of a turn begins inside it. Empty if turns begin outside
            any thought; None if `read` takes both.
    """

    max_turns: int
    stop: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    tools_in_template: bool = False
    opened_thought: str | None = ""

    def check(self, tools: Sequence[ToolSpec]) -> None:  # noqa: B027 - optional: most take any tools
        """Verify that the scheme can work with these tools. Runs before any model is loaded.

        Raises:
            RecipeError: Naming what does not fit, and the next step.
        """

    @abstractmethod
    def prompt(self, question: Question, tools: Sequence[ToolSpec]) -> list[Message]:
        """The chat messages that open a trajectory; the last one is the user's.

        Args:
            question: What is asked; its text is already neutralised.
            tools: What the policy can call.
        """

    @abstractmethod
    def read(self, text: str, turn: int, cut: bool) -> Reading:
        """Parse a turn. Never raises: malformed text gives a `Reading` with a mistake.

        Args:
            text: The turn's sampled text.
            turn: Its number, from 0; the last is `max_turns - 1`.
            cut: True if the turn ran out of tokens. Leave out anything that such a turn began and
                did not end: half an answer is no answer. Its calls are never run.
        """

    def write(self, reading: Reading, thought: str = "") -> str:
        """The text of a turn from which `read` gets this reading, for demonstrations
        (`turnrl warmup`). Optional.

        Args:
            reading: The calls of the turn, or its answer.
            thought: Text that the turn opens with before it acts, if the scheme has a place for it.
        Raises:
            RecipeError: If the scheme has no form for the reading. The default has no form for any.
        """
        raise RecipeError(
            f"the segmenter {type(self).__name__} does not say how a turn is written. Define "
            "write in its class, or give 'turnrl warmup' texts of your own with --by."
        )

    @abstractmethod
    def observe(self, reading: Reading, results: Sequence[ToolResult]) -> list[Message]:
        """The messages that the policy reads after a turn: at least one, of role `user` or `tool`.

        Args:
            reading: What was read in the turn; `format_error` is worth repeating to the policy.
            results: One result per call, contents already neutralised.
        """


class AttemptOver(BaseException):
    """Ends a player's `play` when its attempt is over. It is no `Exception`, so a player that
    guards its own code with `except Exception` does not catch it."""


class Attempt(Protocol):
    """An attempt at a question under way, as its player sees it.

    Everything that the model writes and that tools reply becomes part of the trajectory. The limits
    of the rollout hold whatever the player does: once the attempt is over (a tool ended it, the
    turns or the tokens are used up), `reply` ends `play` by raising `AttemptOver`.
    """

    @property
    def question(self) -> Question:
        """The question; control tokens and the player's tags in its text are neutralised."""

    @property
    def opening(self) -> str:
        """Text that the tools show before the first turn, such as the first observation of an
        environment; usually empty."""

    @property
    def tools(self) -> Sequence[ToolSpec]:
        """The tools that can be called, those of the attempt's own sessions included."""

    @property
    def turns(self) -> Sequence[Turn]:
        """The turns so far."""

    async def reply(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        stop: Sequence[str] = (),
    ) -> Reply:
        """Sample the next turn.

        If the messages continue an earlier call (all of its messages, the reply word for word, then
        messages of role `user` or `tool`) with the same tools, the tokens of that history are
        extended. Otherwise a new history begins, for example after the context was summarised.

        It waits for calls that are under way, so that each belongs to the turn that made it. If
        you cancel it, the history cannot be extended any more: the next reply begins a new one.

        Args:
            messages: The conversation so far; the last message is not the assistant's.
            tools: Tools that the chat template describes to the model.
            stop: Texts that end the turn when the sampled text contains one.
        Raises:
            AttemptOver: If the attempt is over. Let it pass.
            PluginError: If the messages are no messages, or another reply is being sampled.
            DataError: If the first messages leave no room for a turn.
        """

    def read(self, reading: Reading) -> None:
        """Record how the last turn was parsed: its calls, its answer, any error of form. `call`
        already records calls, and the value that `play` returns is recorded as the answer."""

    async def call(self, calls: Sequence[ToolCall]) -> tuple[ToolResult, ...]:
        """Run calls of the last turn. Each is checked, timed, and batched with the calls of other
        trajectories. They run to their end even if you cancel this.

        Returns:
            One result per call, its text cut and neutralised. A mistake of the policy (no such
            tool, wrong arguments) is a result with `ok=False`.
        Raises:
            AttemptOver: If the attempt is over. Let it pass.
            ToolError: If a tool's world is broken. It ends the attempt even if you catch it.
        """


@contract("turnrl_players")
class Player(ABC):
    """Drives an attempt: asks the model, calls tools, decides when to stop. Use it for agents that
    are not a fixed loop of turns. If a `Segmenter` can express yours, that is simpler.

    One instance plays many attempts side by side, so keep whatever belongs to one attempt in local
    variables of `play`.

    Attributes:
        max_turns: K, the most replies that an attempt may ask for; at least 1.
        tags: Tag names with a meaning to the player; they are neutralised in questions and tool
            results.
        opened_thought: See `Segmenter.opened_thought`.
    """

    max_turns: int
    tags: tuple[str, ...] = ()
    opened_thought: str | None = ""

    def check(self, tools: Sequence[ToolSpec]) -> None:  # noqa: B027 - optional: most take any tools
        """Verify that the player can work with these tools. Runs before any model is loaded.

        Raises:
            RecipeError: Naming what does not fit, and the next step.
        """

    @abstractmethod
    async def play(self, attempt: Attempt) -> str | None:
        """Play an attempt to its end, on the event loop of all attempts: await, never block.

        Args:
            attempt: The attempt; it has the question, the model and the tools.
        Returns:
            The final answer; None if there is none.
        """
