"""The text games of the docs, won by scripts. Each needs a package that turnrl does not bring."""

from __future__ import annotations

import importlib
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from turnrl import Question, Rollout
from turnrl.testing import ScriptedEngine
from turnrl_environments import Environment, EnvironmentReward, Gymnasium
from turnrl_segmenters import Action

PAGE = (Path(__file__).parent.parent / "docs" / "howto" / "games.md").read_text()
WORLDS = {"Environment": Environment, "Gymnasium": Gymnasium}


def block(name):
    (text,) = re.findall(rf"<!-- {re.escape(name)} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    return text


@pytest.fixture
def page(tmp_path, monkeypatch):
    """A folder with the page's files, in which a game is played: a recipe, and a policy's texts."""
    for name in ("arena.py", "quest.py"):
        (tmp_path / name).write_text(block(name))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in ("arena", "quest"):
        sys.modules.pop(name, None)


def played(chat, name, seed, says, size=1):
    """Attempts at a game of the page's recipe."""
    settings = yaml.safe_load(block(name))["model"]["rollout"]
    (tool,) = settings["tools"]
    world = WORLDS[tool["class_path"]](**tool["init_args"])
    engine = ScriptedEngine(chat.tokenizer, lambda session, turn: says[turn])
    rollout = Rollout(
        Action(**settings["segmenter"]["init_args"]),
        [world],
        max_turn_tokens=64,
        max_tokens=8000,
    )
    rollout.check(chat)
    question = Question(f"seed {seed}", "Play.", metadata={"seed": seed})
    with rollout.running_tools():
        (group,) = rollout.play(engine, chat, [question], size, (0,))
    return group


def earned(trajectory):
    reward = EnvironmentReward()
    return [reward.score(trajectory, k) for k in range(len(trajectory.turns))]


def opening(chat, trajectory):
    return chat.tokenizer.decode(trajectory.sample.prompt_ids)


def test_the_page_needs_at_most_thirty_lines_for_a_game():
    for files in (["gem.yaml"], ["arena.py"], ["quest.py"]):
        lines = [line for name in files for line in block(name).splitlines() if line.strip()]
        assert len(lines) <= 30


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_game_of_gem_is_won(chat, page, seed):
    pytest.importorskip("gem", reason="needs gem-llm, which no extra brings")
    number = random.Random(seed).randint(1, 10)
    says = [f"\\boxed{{{number % 10 + 1}}}", f"I say \\boxed{{{number}}}"]
    group = played(chat, "gem.yaml", seed, says, size=16)
    assert all("between 1 and 10" in opening(chat, attempt) for attempt in group)
    assert [attempt.ended_by for attempt in group] == [
        "tool"
    ] * 16  # all of a group have one number
    assert {tuple(earned(attempt)) for attempt in group} == {(0.0, 1.0)}
    (lost,) = played(chat, "gem.yaml", seed, ["seven"])
    assert earned(lost) == pytest.approx([-0.1])


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_a_game_of_textarena_is_won(chat, page, seed):
    pytest.importorskip("textarena", reason="needs textarena, which no extra brings")
    number = random.Random(seed).randint(1, 20)
    group = played(chat, "arena.yaml", seed, [f"[{number % 20 + 1}]", f"[{number}]"], size=16)
    assert all("between 1 and 20" in opening(chat, attempt) for attempt in group)
    assert [attempt.ended_by for attempt in group] == ["tool"] * 16
    assert {tuple(earned(attempt)) for attempt in group} == {(0.0, 1.0)}
    news = group[0].turns[0].results[0].content
    assert "The target number is" in news
    assert "You are Player" not in news  # the policy has read the rules


@pytest.mark.filterwarnings("ignore:.*is not fully supported")
def test_a_quest_of_textworld_is_won(chat, page):
    textworld = pytest.importorskip("textworld", reason="needs textworld, which no extra brings")
    (page / "games").mkdir()
    made = re.search(r"do (tw-make custom .*?);", PAGE)[1]
    make = shutil.which("tw-make") or str(Path(sys.executable).with_name("tw-make"))
    command = made.replace("tw-make", make, 1).replace("$n", "3")
    subprocess.run(command.split(), check=True, capture_output=True)
    game = textworld.start("games/train/3.z8", textworld.EnvInfos(policy_commands=True))
    wins = list(game.reset().policy_commands)
    importlib.import_module("quest")
    group = played(chat, "quest.yaml", 3, ["look", *wins], size=8)
    assert [attempt.ended_by for attempt in group] == ["tool"] * 8
    paid = [-0.1, *[0.9] * (len(wins) - 1), 5.0]
    for attempt in group:
        assert earned(attempt) == pytest.approx(paid)
        assert "You can: " in opening(chat, attempt)
        assert wins[0] in opening(chat, attempt)
