"""An outcome reward: what a trajectory earns by how it ended."""

from typing import final

from turnrl import OutcomeReward, Trajectory, answer_in_results, exact_match


@final
class ExampleLookedUp(OutcomeReward):
    """weight if the answer is an accepted one that the policy read in a result.

    Whatever can be had without solving the task will be found and farmed. So nothing is paid for
    trying: not for an answer at all, not for a call, not for the form.

    Args:
        weight: Reward of a right answer that was looked up.
        from_memory: Share of the weight for a right answer that no result contains.
    """

    def __init__(self, weight: float = 1.0, from_memory: float = 0.5) -> None:
        self.weight = weight
        self.from_memory = from_memory

    def score(self, trajectory: Trajectory) -> float:
        question = trajectory.question
        if not exact_match(trajectory.answer, question):  # no answer at all is None, and no match
            return 0.0
        read = answer_in_results(trajectory.results, question)
        return self.weight if read else self.weight * self.from_memory
