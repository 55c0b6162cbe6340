"""The words of turnrl, as types.

    Question      what is asked, and the answers that count
    Turn          one stretch of sampled text, what was read in it, and what the tools replied
    Sample        a history of tokens, as the policy read and wrote them
    Trajectory    the turns of one attempt, and its samples
    Group         the trajectories of one question and their rewards, compared with each other
    Probe         another continuation of a trajectory, from the start of one of its turns
    Critic        a value head that predicts each token's return
    Completion    the tokens that an engine sampled in one turn

A plugin extends these contracts: a `Segmenter` defines the turns, a `Player` drives attempts of any
other shape, a `Tool` acts, `TurnReward` and `OutcomeReward` score, an `AdvantageEstimator` turns a
group into credit, an `Objective` turns sampled tokens into a loss, a `QuestionSource` supplies
questions, an `Engine` turns token ids into more token ids, an `AnswerRule` decides which answers
are the same, a `Check` examines a run before it begins. Everything here needs only the standard
library and pluggy, so `import turnrl` stays cheap.

Axes, wherever tensors appear: B batch, G group, K turn, T token.
"""

from turnrl.types.acting import *  # noqa: F403
from turnrl.types.contracts import *  # noqa: F403
from turnrl.types.engine import *  # noqa: F403
from turnrl.types.examination import *  # noqa: F403
from turnrl.types.group import *  # noqa: F403
from turnrl.types.objective import *  # noqa: F403
from turnrl.types.questions import *  # noqa: F403
from turnrl.types.sessions import *  # noqa: F403
from turnrl.types.trajectory import *  # noqa: F403
