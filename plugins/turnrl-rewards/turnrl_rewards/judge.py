"""A language model as the judge: `LLMJudge` of answers, `LLMJudgeTurn` of the progress of turns.

Both use any server that speaks OpenAI's chat completions, and send all requests before scoring.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from turnrl import OutcomeReward, Trajectory
from turnrl.engines import SampledPolicy
from turnrl.rewards.answers import is_empty_answer
from turnrl_rewards.progress import Difference, StateScore, informed_turns
from turnrl_rewards.server import JudgeServer
from turnrl_rewards.verdicts import Case, Verdicts

_HERE = Path(__file__).parent
ANSWER_PROMPT = (_HERE / "answer_prompt.txt").read_text(encoding="utf-8")
STATE_PROMPT = (_HERE / "state_prompt.txt").read_text(encoding="utf-8")


@final
class LLMJudge(OutcomeReward):
    """weight x the score, 0 to 1, that a language model gives the answer; 0 without an answer,
    which needs no request. In units of reward.

    This is an outcome, not a shaping. Each distinct question and answer is judged once, at
    temperature 0, before scoring. While the server is away the run waits; after `patience_s` it
    stops, so it never trains on an outage. If a reply has no verdict, the judge is asked once more;
    then the run stops.

    Args:
        server: The judge.
        weight: Reward of a right answer.
        prompt: The prompt, with {question}, {answers} and {answer}; `ANSWER_PROMPT` by default.
            The texts filled in cannot contain its tags.
    """

    def __init__(self, server: JudgeServer, weight: float = 1.0, prompt: str | None = None) -> None:
        self.weight = weight
        places = ("question", "answers", "answer")
        self._verdicts = Verdicts(server, prompt or ANSWER_PROMPT, places)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[LLMJudge]:
        """The same judge without its cache, and almost without patience."""
        rehearsed = copy.copy(self)
        rehearsed._verdicts = self._verdicts.rehearsal()
        yield rehearsed

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        self._verdicts.ask(map(self._case, trajectories))

    def score(self, trajectory: Trajectory) -> float:
        return self.weight * self._verdicts.get(self._case(trajectory))

    def _case(self, trajectory: Trajectory) -> Case | None:
        answer = trajectory.answer
        if answer is None or is_empty_answer(answer, trajectory.question):
            return None
        return {**_question_texts(trajectory), "answer": answer}


@final
class JudgedState(StateScore):
    """The share, 0 to 1, of the needed information that a language model finds in the text read so
    far; see `LLMJudgeTurn`."""

    def __init__(self, server: JudgeServer, prompt: str | None = None) -> None:
        places = ("question", "answers", "transcript")
        self._verdicts = Verdicts(server, prompt or STATE_PROMPT, places)

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[JudgedState]:
        """The same judge without its cache, and almost without patience."""
        rehearsed = copy.copy(self)
        rehearsed._verdicts = self._verdicts.rehearsal()
        yield rehearsed

    def prepare(self, trajectories: Sequence[Trajectory], policy: SampledPolicy | None) -> None:
        self._verdicts.ask(
            self._case(trajectory, turns)
            for trajectory in trajectories
            for turns in range(len(trajectory.turns) + 1)
        )

    def score(self, trajectory: Trajectory, turns: int) -> float:
        return self._verdicts.get(self._case(trajectory, turns))

    def _case(self, trajectory: Trajectory, turns: int) -> Case | None:
        turns_read = informed_turns(trajectory, turns)
        if not turns_read:
            return None
        turns_shown = enumerate(trajectory.turns[:turns_read], 1)
        transcript = "\n".join(f"-- turn {number}\n{turn}" for number, turn in turns_shown)
        return {**_question_texts(trajectory), "transcript": transcript}


@final
class LLMJudgeTurn(Difference):
    """r_k = weight x (phi(s_{k+1}) - phi(s_k)), with phi the share, 0 to 1, of the information
    needed for an answer that a language model finds in the results so far. In units of reward.

    It judges states and pays for differences, so a turn that adds nothing earns nothing, however
    well it is written. The sum over a trajectory is weight x the last score: potential-based, see
    `turnrl_rewards.progress`. A state without a successful result scores 0 without a request. The
    transcript ends at the last successful result. Everything else is as in `LLMJudge`. A trajectory
    of K turns costs up to K requests.

    Args:
        server: The judge.
        weight: Reward of going from no information to all the information.
        prompt: The prompt, with {question}, {answers} and {transcript}; `STATE_PROMPT` by default.
            The texts filled in cannot contain its tags.
    """

    def __init__(self, server: JudgeServer, weight: float = 1.0, prompt: str | None = None) -> None:
        super().__init__(JudgedState(server, prompt), weight)


def _question_texts(trajectory: Trajectory) -> Case:
    question = trajectory.question
    answers = "\n".join(f"- {answer}" for answer in question.answers) or "(none are known)"
    return {"question": question.text, "answers": answers}
