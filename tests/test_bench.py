"""`Forced` forces tokens, the task has the sizes that were asked for, and `compare.py` and the
command line do what the page says. Nothing here depends on how fast this machine is."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import importlib.metadata
import inspect
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from commands import fails
from turnrl import Policy, RecipeError, Sampling
from turnrl.cli import main
from turnrl.testing import check_engine
from turnrl_bench import Forced, agent
from turnrl_bench.task import TINY, Shape, Task, make
from turnrl_slots import Slots

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "explanation" / "performance.md"
SCRIPT = ROOT / "plugins" / "turnrl-bench" / "compare.py"
SMALL = Shape(2, 2, 140, (40, 6), 8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small task with a model of two layers."""
    folder = tmp_path_factory.mktemp("task")
    make(folder, SMALL, network=replace(TINY, layers=2))
    return folder


# ------------------------------------------------------------------------------------- forced


def sample(engine, prompt, forks, turns=2, **sampling):
    """What each fork says in each turn, one token between the turns."""

    async def play():
        with contextlib.closing(engine.open(prompt)) as root:
            sessions = [root.fork() for _ in range(forks)]
        asked = Sampling(max_tokens=5, **sampling)
        completions = [
            [await s.generate((4,) * (k > 0), asked) for k in range(turns)] for s in sessions
        ]
        for session in sessions:
            session.close()
        await engine.drain()
        return completions

    return asyncio.run(play())


@pytest.mark.slow
def test_a_forced_engine_given_no_tokens_meets_the_contract():
    policy = Policy("package://turnrl_atlas/starter")
    policy.load()
    check_engine(Forced(Slots(), lambda prompt_ids, member, turn: ()), policy)


def test_each_trajectory_says_its_own_tokens_with_the_models_probabilities(tiny_policy):
    engine = Forced(Slots(), lambda prompt_ids, member, turn: (10 + member, 20 + turn))
    engine.start(tiny_policy, 64)
    engine.sync(0)
    for member, (first, second) in enumerate(sample(engine, (5, 6, 7), 2)):
        assert first.token_ids[:2] == (10 + member, 20)
        assert second.token_ids[:2] == (10 + member, 21)
        with torch.no_grad():
            history = torch.tensor([[5, 6, 7, *first.token_ids, 4]])
            logits = tiny_policy.load()(input_ids=history).logits[0, -1]
        wanted = logits.log_softmax(-1)[10 + member]
        assert second.logprobs[0] == pytest.approx(float(wanted), abs=1e-4)
    engine.close()


def test_without_an_engine_the_tokens_are_there_at_once_and_a_branch_says_the_same():
    engine = Forced(None, lambda prompt_ids, member, turn: (prompt_ids[0], member, turn, 2))
    ((first, second),) = sample(engine, (9,), 1, end_ids=(2,))
    assert (first.token_ids, first.reason) == ((9, 0, 0, 2), "end")
    assert second.token_ids == (9, 0, 1, 2)
    cut = sample(engine, (9,), 1, turns=1, end_ids=(3,))[0][0]
    assert cut.reason == "length"

    async def branch():
        root = engine.open((9,))
        root.fork()
        trunk = root.fork()
        await trunk.generate((), Sampling(max_tokens=5))
        return await trunk.fork().generate((), Sampling(max_tokens=5))

    assert asyncio.run(branch()).token_ids == (9, 1, 1, 2)


def test_options_of_the_engine_inside_are_read_and_set_from_outside():
    inside = Slots(kv_memory="8MB")
    engine = Forced(inside, lambda *_: ())
    assert engine.kv_memory == "8MB"
    engine.kv_memory = "9MB"
    assert inside.kv_memory == "9MB"
    assert "kv_memory" not in vars(engine)
    assert copy.deepcopy(engine).kv_memory == "9MB"
    for other in (engine, Forced(None, lambda *_: ())):
        assert not hasattr(other, "no_such_option")


def test_the_example_in_the_readme_forces_tokens(tiny_policy):
    page = (ROOT / "plugins" / "turnrl-bench" / "README.md").read_text()
    names: dict = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    names["engine"].start(tiny_policy, 64)
    names["engine"].sync(0)
    assert sample(names["engine"], (5,), 1)[0][0].token_ids[:3] == (7, 8, 9)
    names["engine"].close()


# --------------------------------------------------------------------------------------- task


def test_a_task_has_the_requested_sizes_and_distinct_trajectories(folder):
    task, policy = Task.read(folder), Policy(str(folder))
    module = agent.module_of(str(folder), policy, None)
    prompts = [module.rollout.scheme.prompt_ids(q, module.chat) for q in agent.questions_of(task)]
    assert [len(p) for p in prompts] == [140, 140]
    assert len(set(prompts)) == 2
    texts = [tuple(map(tuple, turns)) for members in task.script for turns in members]
    assert {(len(first), len(second)) for first, second in texts} == {(40, 6)}
    assert len(set(texts)) == 4
    encoded = policy.tokenizer(task.article("anything"))["input_ids"]
    assert len(encoded) == pytest.approx(8, abs=1)
    assert task.article("a") == task.article("a") != task.article("b")


def test_lengths_too_short_for_a_task_are_refused_with_the_minimum(tmp_path):
    with pytest.raises(RecipeError, match=r"Ask for \d+ or more") as raised:
        make(tmp_path, replace(SMALL, prompt_tokens=20))
    least = int(re.search(r"for (\d+) or", str(raised.value))[1])
    make(tmp_path, replace(SMALL, prompt_tokens=least))
    with pytest.raises(RecipeError, match="tokens or more in all"):
        make(tmp_path, replace(SMALL, turn_tokens=(8, 6)))


# ------------------------------------------------------------------------------------- script


@pytest.fixture
def compared(nursery, monkeypatch):
    """Runs `compare.py`, and gives what it printed."""
    nursery.stand_in(monkeypatch)

    def run(*arguments):
        command = [sys.executable, str(SCRIPT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_the_script_measures_a_collection_in_its_own_process(compared):
    shown = compared("scale", "--blocks", "1", "--most", "64")
    assert re.search(r"^trajectories +64$", shown, re.MULTILINE)
    (each,) = re.findall(r"^tokens each +([\d.]+)$", shown, re.MULTILINE)
    assert 1 < float(each) < 64
    assert f"torch {importlib.metadata.version('torch')}" in shown


@pytest.mark.slow
@pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")
def test_trl_and_turnrl_do_equal_work_in_a_small_case(compared):
    shown = compared("trl", "--blocks", "1", "--steps", "1", "--prompts", "2", "--rows", "4")
    assert "Equal work: 16 trajectories" in shown
    assert len(re.findall(r"^whole step, s +[\d.]+ +[\d.]+ +[\d.]+x", shown, re.MULTILINE)) == 3


def test_comparison_commands_on_the_page_exist_in_the_script(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    script = importlib.import_module("compare")
    commands = re.findall(r"^(?:OMP\S+ )?python \S+/compare.py (.*)$", PAGE.read_text(), re.M)
    assert len(commands) == 5
    for command in commands:
        kind, *options = command.split()
        known = inspect.signature(getattr(script, kind)).parameters
        assert {option[2:] for option in options if option.startswith("--")} <= set(known)


# ------------------------------------------------------------------------------------ commands


@pytest.mark.parametrize("kind", [[], ["gpu"]])
def test_the_command_has_help_pages(capsys, monkeypatch, kind):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["bench", *kind, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    options = set(re.findall(r"`(--[\w-]+)`", PAGE.read_text()))
    assert {option for option in options if f"  {option}" not in shown} == (
        set() if kind else options
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpu", "--json", "/no/such/folder/x.json"], "in a folder that does not exist"),
        (["gpu"], "there is no GPU here"),
        (["gpu", "--threads", "0"], "turnrl bench"),
        (["trl"], "turnrl bench"),
        ([], "turnrl bench"),
    ],
)
def test_a_users_mistake_is_a_sentence(capsys, arguments, message):
    if arguments == ["gpu"] and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert message in fails(capsys, ["bench", *arguments])
