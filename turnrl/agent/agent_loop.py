"""The agent loop: moves an attempt on, with a segmenter or a player."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Literal

from turnrl.agent.attempt import Attempt
from turnrl.agent.chat import ChatFormat
from turnrl.types import Player, Question, Segmenter, ToolSpec, Trajectory


class AgentLoop(ABC):
    """Moves attempts on with a plugin: with a segmenter turn by turn, with a player from beginning
    to end.

    Attributes:
        kind: The plugin's key in `rollout`.
        branches: True if attempts pause between turns, so that they can be forked there.
        plugin: The segmenter or the player.
        specs: The tools of the recipe.
    """

    kind: ClassVar[Literal["segmenter", "player"]]
    branches: ClassVar[bool]
    plugin: Segmenter | Player
    specs: tuple[ToolSpec, ...]

    @property
    def name(self) -> str:
        """The plugin's name."""
        return type(self.plugin).__name__

    @property
    def stop(self) -> tuple[str, ...]:
        """Texts that end a turn."""
        return ()

    @abstractmethod
    def check(self, chat: ChatFormat) -> None:
        """Check before a run that the plugin works, and that the chat template takes its messages.

        Raises:
            RecipeError: If the plugin does not fit the tools or the template.
            PluginError: If the plugin breaks its contract.
        """

    def check_questions(self, questions: Sequence[Question], chat: ChatFormat) -> None:  # noqa: B027 - a player writes its prompts later
        """Refuse questions with a system message that the chat template lets push out the tools.

        Args:
            questions: The questions.
            chat: The policy's chat format.
        Raises:
            RecipeError: Naming the question, and the next step.
        """

    def count_prompt_tokens(self, question: Question, chat: ChatFormat, least: int) -> int:
        """Number of tokens of a question's prompt, as far as it is known before an attempt begins.
        If it is below `least`, any number below `least` will do. 0 for a player, which writes its
        prompts later."""
        return 0

    def find_misfit(self, opens: str, where: str) -> str | None:
        """The fault if a turn begins in a thought that the plugin does not expect, or outside one
        that it does expect; None if there is none.

        Args:
            opens: The tag that the chat template opens before the turn, if any.
            where: The place of the turn, such as "a prompt".
        """
        expects = self.plugin.opened_thought
        if expects is None or opens == expects:
            return None
        if expects:
            return (
                f"{self.name} reads turns that begin inside {expects}, and the chat template opens "
                f"{opens or 'no thought'} at the end of {where}. Leave out think: opened, "
                "or set model.policy.chat_template to one that opens it."
            )
        own = f"set opened_thought = {opens!r} in its class if it reads such turns"
        settable = "set think: opened in the segmenter (ReAct, SearchR1 and Action have it)"
        return (
            f"the chat template opens a thought with {opens} at the end of {where}, and "
            f"{self.name} reads turns that begin outside of one, so it would do what the policy "
            f"only considers. To fix it, {settable if opens == '<think>' else own}, or set "
            "model.policy.chat_template to one that opens no thought."
        )

    def begin(self, attempts: Sequence[Attempt], chat: ChatFormat) -> None:  # noqa: B027 - a player's begin themselves
        """Begin attempts whose tool sessions are open.

        Raises:
            DataError: If a question leaves no room to act.
        """

    @abstractmethod
    async def advance(self, attempt: Attempt) -> None:
        """Move an attempt on.

        Args:
            attempt: The attempt. `ended_by` is set when it ends.
        """

    def text_before_turns(self, trajectory: Trajectory, chat: ChatFormat) -> Sequence[str]:
        """The text that the policy read right before each turn, as lines to print; empty if the
        question and the results of its calls show it already."""
        return ()
