"""What `turnrl bench` compares is comparable, what it prints is what was found, and a user's
mistake is a sentence. Nothing here depends on how fast this machine is."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import json
import mmap
import re
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from turnrl_bench import Forced, equal, ours, world
from turnrl_bench.measure import BenchError, Clock, Peak, Report, Side, Table, ratio, seconds
from turnrl_bench.task import TINY, Shape, Task, make, reward
from turnrl_slots import Slots

from commands import fails
from turnrl import Policy, RecipeError, Sampling
from turnrl.cli import main
from turnrl.testing import check_engine

ROOT = Path(__file__).parents[1]
KINDS = ("trl", "engine", "learn", "tools", "scale", "gpu")
SMALL = Shape(2, 2, 140, (40, 6), 8)
quiet = pytest.mark.filterwarnings("ignore")  # a user's script shows Lightning's remarks
has_trl = pytest.mark.skipif(find_spec("trl") is None, reason="TRL is not installed")


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
        said = [[await s.generate((4,) * (k > 0), asked) for k in range(turns)] for s in sessions]
        for session in sessions:
            session.close()
        await engine.drain()
        return said

    return asyncio.run(play())


def test_an_engine_that_is_told_nothing_keeps_to_the_contract():
    policy = Policy(world.STARTER)
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


def test_a_task_has_the_sizes_that_were_asked_for_and_no_two_trajectories_say_the_same(folder):
    task, policy = Task.read(folder), Policy(str(folder))
    module = ours.module_of(str(folder), policy, None)
    prompts = [module.rollout.prompt(q, module.chat) for q in ours.questions_of(task)]
    assert [len(p) for p in prompts] == [140, 140]
    assert len(set(prompts)) == 2
    said = [tuple(map(tuple, one)) for members in task.script for one in members]
    assert {(len(first), len(second)) for first, second in said} == {(40, 6)}
    assert len(set(said)) == 4
    encoded = policy.tokenizer(task.article("anything"))["input_ids"]
    assert len(encoded) == pytest.approx(8, abs=1)
    assert task.article("a") == task.article("a") != task.article("b")


def test_what_is_too_short_for_a_task_is_told_with_the_least_that_is_enough(tmp_path):
    with pytest.raises(RecipeError, match=r"Ask for \d+ or more") as told:
        make(tmp_path, replace(SMALL, prompt_tokens=20))
    least = int(re.search(r"for (\d+) or", str(told.value))[1])
    make(tmp_path, replace(SMALL, prompt_tokens=least))
    with pytest.raises(RecipeError, match="tokens or more in all"):
        make(tmp_path, replace(SMALL, turn_tokens=(8, 6)))


@quiet
def test_an_iteration_of_ours_takes_its_parts_and_learns_from_the_script(folder, tmp_path):
    file = str(tmp_path / "gradient.pt")
    found = ours.iterations(str(folder), 1, 1, updates=2, gradient=file)
    assert found["trajectories"] == 4
    assert found["sampled"] == 4 * (40 + 6)
    assert [len(work["calls"]) for work in found["work"]] == [1] * 4
    script = [[*said[0], *said[1]] for members in Task.read(folder).script for said in members]
    played = [[t for t, m in zip(w["ids"], w["loss"], strict=True) if m] for w in found["work"]]
    assert sorted(played) == sorted(script)
    times = found["times"]
    assert {len(pairs) for pairs in times.values()} == {1}
    for clock in (0, 1):
        parts = times["rollouts"][0][clock] + times["learning"][0][clock]
        assert parts == pytest.approx(times["whole step"][0][clock])
    assert "model.embed_tokens.weight" in torch.load(file)


@quiet
def test_without_an_engine_the_gradient_is_the_same(folder, tmp_path):
    files = [tmp_path / "sampled.pt", tmp_path / "given.pt"]
    for file, samples in zip(files, (True, False), strict=True):
        ours.iterations(str(folder), 1, 0, samples=samples, gradient=str(file))
    cosine, norms = equal.gradient_cosine(*files)
    assert cosine == pytest.approx(1, abs=1e-6)
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


# --------------------------------------------------------------------------------- equal work


def work_of(**changes):
    return {
        "prompt": [1, 2],
        "ids": [3, 4, 5, 6],
        "loss": [1, 1, 0, 1],
        "calls": [["search", {"query": "x"}]],
        "reward": 0.5,
        **changes,
    }


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"prompt": [1, 9]}, "prompt tokens"),
        ({"ids": [3, 4, 5, 9]}, "sampled tokens"),
        ({"ids": [3, 4, 9, 6]}, "tokens after the prompts"),
        ({"loss": [1, 0, 1, 1]}, "loss tokens"),
        ({"calls": []}, "tool calls"),
        ({"reward": 0.6}, "rewards"),
    ],
)
def test_work_that_differs_anywhere_is_not_equal(tmp_path, changes, what):
    files = (tmp_path / "a.pt", tmp_path / "b.pt")
    for file in files:
        torch.save({"w": torch.tensor([1.0, 2.0])}, file)
    mine = {"work": [work_of(), work_of(ids=[7, 7, 7, 7])]}
    assert equal.compare(mine, copy.deepcopy(mine), files)[1]
    theirs = {"work": [work_of(**changes), work_of(ids=[7, 7, 7, 7])]}
    rows, passed = equal.compare(mine, theirs, files)
    assert not passed
    assert what in [row[0] for row in rows if row[1] == "DIFFERENT"]


def test_gradients_that_point_elsewhere_are_not_equal(tmp_path):
    files = (tmp_path / "a.pt", tmp_path / "b.pt")
    torch.save({"w": torch.tensor([1.0, 0.0])}, files[0])
    # cosine 1 / sqrt(1 + 0.02^2) = 0.9998
    torch.save({"w": torch.tensor([1.0, 0.02])}, files[1])
    mine = {"work": [work_of()]}
    rows, passed = equal.compare(mine, mine, files)
    assert not passed
    assert "cosine 0.99980" in rows[-1][2]
    torch.save({"other": torch.tensor([1.0, 0.0])}, files[1])
    assert equal.gradient_cosine(*files)[0] == 0


TRL_SMALL = [
    *("bench", "trl", "--blocks", "1", "--steps", "1", "--prompts", "2", "--group-size", "2"),
    *("--tokens", "64", "--trl-rows", "2", "--tool-ms", "5"),
]


@has_trl
@pytest.mark.slow
def test_trl_and_turnrl_do_equal_work_in_a_small_case(capsys, tmp_path):
    file = tmp_path / "found.json"
    assert main([*TRL_SMALL, "--json", str(file)]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^\w.* equal ", shown, re.MULTILINE)) == 7
    assert all(len(line) <= 80 for line in shown.splitlines()), shown
    found = json.loads(file.read_text())
    assert found["equal_work"]
    rows = {row[0]: row for row in found["tables"][1]["rows"]}
    assert {*rows} == {
        *("rollouts", "learning", "whole step", "whole step, two updates"),
        "whole step, 5 ms tool",
    }
    for column in (1, 2, 3, 4):
        parts = float(rows["rollouts"][column]) + float(rows["learning"][column])
        assert parts == pytest.approx(float(rows["whole step"][column]), abs=0.02)


@has_trl
@pytest.mark.slow
def test_a_gate_that_fails_ends_with_1_and_nothing_is_timed(capsys, monkeypatch):
    monkeypatch.setattr(equal, "LEAST_COSINE", 1.1)  # more than a cosine can be
    assert main(TRL_SMALL) == 1
    shown = capsys.readouterr().out
    assert re.search(r"gradients +DIFFERENT", shown)
    assert "rollouts" not in shown


# ------------------------------------------------------------------------------------ measuring


def test_a_ratio_is_that_of_medians_and_spreads_over_neighbouring_blocks():
    # medians of all: 4 and 2; of blocks: 4/1, 5/2 and 3/3
    found = ratio([[4, 4], [5, 5], [3, 3]], [[1, 1], [2, 2], [3, 3]])
    assert (found.value, found.low, found.high) == (2, 1, 4)
    assert str(found) == "2.00x (1.00-4.00)"


def test_a_table_is_aligned_and_can_stand_on_a_page():
    table = Table(("what", "s"), (("short", "1.00"), ("much longer", "10.00")))
    assert table.text() == "what             s\nshort         1.00\nmuch longer  10.00"
    assert table.markdown().splitlines()[:2] == ["| what | s |", "| --- | --- |"]


def test_a_report_names_machine_versions_and_load_and_is_saved_with_its_numbers(tmp_path):
    table = Table(("what", "s"), (("x", "1"),))
    report = Report("Title", ["A note. " * 20], [table], {"blocks": [1, 2]})
    shown = report.show(markdown=False)
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert f"torch {torch.__version__}" in shown
    assert "load average" in shown
    assert "| x | 1 |" in report.show(markdown=True)
    report.save(tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["blocks"] == [1, 2]
    assert found["machine"]["versions"]["torch"] == torch.__version__


def test_a_clock_keeps_wall_and_cpu_seconds():
    clock = Clock()
    clock.keep("sleep", (1.0, 1.0), (3.0, 1.5))
    assert seconds([{"times": clock.times}], "sleep") == [[2.0]]
    assert seconds([{"times": clock.times}], "sleep", 1) == [[0.5]]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux counts peaks")
def test_a_peak_is_what_was_held_at_most_since():
    gc.collect()  # what other tests left would be given back while we look
    peak = Peak()
    # from the system itself: of what other tests have freed, memory that is there would be used
    with mmap.mmap(-1, 64 * 2**20) as held:
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
    assert 60e6 < peak.bytes < 90e6
    assert Peak().bytes < 10e6


def test_a_block_that_fails_says_why_in_a_sentence(capsys):
    side = Side("broken", "turnrl_bench.task:reward", {"text": 3})
    with pytest.raises(BenchError, match="a block of broken failed: AttributeError: 'int'"):
        side.run()
    assert Side("whole", "turnrl_bench.task:reward", {"text": "yes"}).run() == reward("yes")


# ------------------------------------------------------------------------------------ commands


@pytest.mark.slow
def test_an_engine_is_measured_alone(capsys):
    small = ["--blocks", "1", "--steps", "1", "--prompts", "2", "--group-size", "2"]
    sizes = ["--prompt-tokens", "12", "--tokens", "5", "--threads", "1"]
    assert main(["bench", "engine", *small, *sizes]) == 0
    shown = capsys.readouterr().out
    # 2 prompts x 2 requests x 5 tokens
    assert re.search(r"Slots +20 ", shown)
    assert "vLLM was not measured: --url names no server." in shown


@quiet
@pytest.mark.slow
def test_collections_with_slow_tools_are_timed_and_sample_the_same():
    delays = [["0 ms", 0, False], ["30 ms", 30, True]]
    found = [world.tools(delays, lockstep, 2, 2, 1) for lockstep in (True, False)]
    assert [[*f["times"]] for f in found] == [["0 ms", "30 ms"]] * 2
    assert found[0]["sampled"] == found[1]["sampled"] > 0


@quiet
def test_a_collection_has_as_many_trajectories_as_were_asked_for():
    found = world.scale(8, 4, {"slots": 4})
    assert found["trajectories"] == 8
    assert found["sampled"] >= 8


@pytest.mark.slow
def test_learning_is_measured(capsys):
    small = ["--blocks", "1", "--steps", "1", "--prompts", "2", "--group-size", "2"]
    assert main(["bench", "learn", *small]) == 0
    shown = capsys.readouterr().out
    assert "4096 loss tokens" in shown
    share = int(re.search(r"share +(\d+) %", shown)[1])
    assert share < 40


@pytest.mark.slow
def test_lockstep_is_measured(capsys):
    small = ["--blocks", "1", "--steps", "1", "--prompts", "2", "--group-size", "2"]
    assert main(["bench", "tools", *small, "--tool-ms", "0", "20"]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("20 ms, each its own")]


@pytest.mark.slow
def test_many_trajectories_are_measured(capsys):
    assert main(["bench", "scale", "--blocks", "1", "--trajectories", "16", "32"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^(16|32) +[\d.]+ ", shown, re.MULTILINE)) == 2


@pytest.mark.parametrize("kind", ["", *KINDS])
def test_every_measurement_has_a_help_page(capsys, monkeypatch, kind):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(["bench", *[kind] * bool(kind), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert "--json FILE" in shown if kind else all(name in shown for name in KINDS)


def test_the_options_on_the_page_are_those_of_the_help_pages(capsys):
    page = (ROOT / "docs" / "explanation" / "performance.md").read_text()
    for kind in KINDS:
        with pytest.raises(SystemExit):
            main(["bench", kind, "--help"])
    told = capsys.readouterr().out
    options = set(re.findall(r"`(--[\w-]+)`", page))
    assert {"--json", "--tiny", "--url"} <= options
    assert {option for option in options if f"  {option}" not in told} == set()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["trl"], "TRL is not installed"),
        (["engine", "--url", "http://127.0.0.1:9"], "no vLLM server answers at --url"),
        (["engine", "--url", "nonsense"], "begins with http://"),
        (["learn", "--tokens", "10"], "tokens or more in all"),
        (["scale", "--trajectories", "20"], "20, which groups of 16 do not divide"),
        (["tools", "--json", "/no/such/folder/x.json"], "in a folder that is not there"),
        (["gpu"], "there is no GPU here"),
    ],
)
def test_a_users_mistake_is_a_sentence(capsys, monkeypatch, arguments, told):
    monkeypatch.setitem(sys.modules, "trl", None)  # as if it were not installed
    if arguments == ["gpu"] and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    assert told in fails(capsys, ["bench", *arguments])


@pytest.mark.parametrize(
    "arguments",
    [["engine", "--blocks", "0"], ["tools", "--tool-ms", "-1"], ["nothing"], []],
)
def test_a_number_that_cannot_be_is_refused_before_anything_runs(capsys, arguments):
    assert "turnrl bench" in fails(capsys, ["bench", *arguments])
