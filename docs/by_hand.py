"""Training by hand: module, data and Trainer built in Python, with a tool of one's own."""

import functools

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger

from turnrl import MTGRPO, Policy, QuestionData, Rollout, Tool, ToolResult, TurnLevel
from turnrl_atlas import Atlas
from turnrl_rewards.qa import AnswerRetrieved, ExactMatch, ToolExecuted
from turnrl_segmenters.two_turn import TwoTurn


class Gazetteer(Tool):
    """Finds the page of the place whose name ends the query."""

    name, description = "search", "Looks a place up."
    parameters = {"type": "object", "properties": {"query": {"type": "string"}}}
    pages = {page.title: page.text for page in Atlas().passages()}

    def run(self, calls):
        places = [call.arguments.get("query", "").rpartition(" of ")[2] for call in calls]
        return [ToolResult(self.pages.get(place, "no such place")) for place in places]


rollout = Rollout(TwoTurn("Tools: [search(query)]"), [Gazetteer()], max_turn_tokens=64)
rewards = [ToolExecuted(), AnswerRetrieved(), ExactMatch()]
adamw = functools.partial(torch.optim.AdamW, lr=2e-4)
policy = Policy("package://turnrl_atlas/starter")
module = MTGRPO(policy, rollout, rewards, TurnLevel(), group_size=8, optimizer=adamw)
data = QuestionData("Atlas", "Atlas", questions_per_iteration=8, val_limit=64)
logger = CSVLogger("runs", "by_hand")
L.Trainer(max_epochs=2, accelerator="cpu", num_sanity_val_steps=0, logger=logger).fit(module, data)
