"""A loop of your own: sample, score, assign credit and step an optimiser, without Lightning."""

import torch

import turnrl
from turnrl.agent.chat import ChatFormat
from turnrl.policy.scoring import score_trajectories
from turnrl_atlas import Atlas
from turnrl_rewards import AnswerRetrieved, ExactMatch, ToolExecuted
from turnrl_segmenters import TwoTurn
from turnrl_slots import Slots

pages = {page.title: page.text for page in Atlas().passages()}


def search(query: str) -> str:
    """Find the page of the place whose name ends the query."""
    return pages.get(query.rpartition(" of ")[2], "no such place")


policy = turnrl.Policy("package://turnrl_atlas/starter").build()
policy.load()
rollout = turnrl.Rollout(TwoTurn("Tools: [search(query)]"), [search], max_turn_tokens=64)
rewards = [ToolExecuted(), AnswerRetrieved(), ExactMatch()]
chat, engine = ChatFormat(policy.tokenizer), Slots().build()
engine.start(policy, rollout.max_tokens)
optimizer = torch.optim.AdamW(policy.parameter_groups(), lr=6e-4)
questions = turnrl.load_questions("Atlas", role="train")
for step in range(40):
    engine.sync(step)  # it samples with the weights as they are now
    played = rollout.play(engine, chat, questions[step * 8 : step * 8 + 8], 8, (step,))
    groups = [turnrl.score_group(attempts, rewards) for attempts in played]
    credits = [turnrl.assign_credit(group, turnrl.TurnLevel()) for group in groups]
    advantages = torch.cat([tokens for credit in credits for tokens in credit.tokens])
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    scores = score_trajectories(trajectories, policy.score_with_grad)
    # these weights sampled the tokens, so the ratio is 1 and needs no clip
    loss = -(torch.cat([s.logprobs for s in scores]) * advantages).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: reward {torch.cat([g.outcome for g in groups]).mean():.3f}")
engine.close()
