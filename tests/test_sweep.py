"""`turnrl sweep`: real runs of a small recipe, killed, repeated, and counted."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from filelock import FileLock

from commands import fails, save
from nursery import command
from runs import TIMINGS
from turnrl import build
from turnrl.cli import main
from turnrl.commands.sweep import jobs, matrix, results, table
from turnrl.runs.compare import compare, open_sides
from turnrl.runs.statistics import difference_over_seeds, student_interval
from worlds import Echo

TESTS = Path(__file__).parent
TWO = "--set=model.estimator=OutcomeOnly,TurnLevel"
SWEEP = Path("runs", "recipe-sweep")


class Watched(Echo):
    """Leaves the number of its process, and takes a moment for every batch of calls."""

    def run(self, calls):
        Path("pids").mkdir(exist_ok=True)
        Path("pids", str(os.getpid())).touch()
        time.sleep(0.1)
        return super().run(calls)


class Mended(Echo):
    """Breaks until there is a file called `mended`."""

    def run(self, calls):
        if not Path("mended").exists():
            raise OSError("the world is \x1b[31mbroken")
        return super().run(calls)


@pytest.fixture
def start(recipe, nursery):
    """Starts a sweep of the small recipe as a user does; what it prints goes into `sweep.out`."""
    started = []
    path = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, **nursery.environment, "PYTHONPATH": path}

    def begin(*words, program=()):
        with Path("sweep.out").open("w") as out:
            process = subprocess.Popen(
                [*(program or command()), "sweep", "recipe.yaml", *words],
                env=environment,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
    wait_until(lambda: not alive())


@pytest.fixture
def sweep(recipe, nursery, monkeypatch, capsys):
    """Runs a sweep to its end, in this process, and gives its exit code and what it printed."""
    nursery.stand_in(monkeypatch)

    def run(*words):
        capsys.readouterr()
        code = main(["sweep", "recipe.yaml", *words])
        return code, capsys.readouterr().out

    return run


def alive():
    """The runs that are at work here, by the tools that they have called."""
    running = []
    for file in Path("pids").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            if Path("/proc", file.name, "cwd").readlink() == Path.cwd():  # and not another's number
                running.append(file)
    return running


def wait_until(what, within_s=120.0):
    deadline = time.monotonic() + within_s
    while not (value := what()):
        assert time.monotonic() < deadline, Path("sweep.out").read_text()
        time.sleep(0.02)
    return value


def shown(text):
    """The table with its legend and notes."""
    return text[text.index("\nA  ") : text.index("\nSee the runs")]


def figures(run):
    """The rows of a run's metrics, without what the clock says."""
    with Path(run, "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if k not in TIMINGS} for row in csv.DictReader(file)]


def lines(folder=SWEEP):
    """The lines of the finished runs, in the order of their names, without what the clock says."""
    finished = [json.loads(line) for line in Path(folder, "results.jsonl").read_text().splitlines()]
    for line in finished:
        del line["ended"], line["curves"]["seconds"]
    return sorted(finished, key=lambda line: (str(line["settings"]), line["seed"]))


def runs(folder=SWEEP):
    return sorted(Path(folder).glob("*/version_*"))


# --------------------------------------------------------------------------------- a whole sweep


def test_every_seed_with_every_setting_is_run_once(recipe, sweep):
    recipe["trainer"]["max_epochs"] = 1
    save(recipe)
    code, text = sweep("--seeds=0..1", TWO)
    assert code == 0, text
    assert "4 runs (2 settings x 2 seeds) in runs/recipe-sweep\n" in text
    assert len(re.findall(r"^\S+  begins  estimator=\w+, seed [01]$", text, re.MULTILINE)) == 4
    ended = re.findall(r"^\S+  done    estimator=\w+, seed [01], exact.* (\d) left", text, re.M)
    assert ended == ["3", "2", "1", "0"]
    assert len(lines()) == len(runs()) == 4
    assert [run.name for run in runs()] == ["version_0"] * 4
    line = lines()[1]
    assert (line["settings"], line["seed"]) == ({"model.estimator": "OutcomeOnly"}, 1)
    assert line["curves"]["iteration"] == [0, 1]

    # each is a real fit, to the last digit
    options = ["--model.estimator=TurnLevel", "--seed_everything=1"]
    assert main(["fit", "recipe.yaml", *options]) == 0
    (run,) = Path(SWEEP).glob("estimator_TurnLevel-seed_1-*/version_0")
    assert figures(run) == figures("runs/recipe/version_0")

    # 'turnrl compare' on the same runs finds the same differences
    (compared,) = compare(open_sides([*map(str, runs())]))
    cells = matrix.read_cells(["recipe.yaml"], "0..1", [TWO.removeprefix("--set=")])[1]
    ours = table.tabulate(cells, results.read_results(SWEEP)[0]).rows[1].gains["reward/total"]
    theirs = compared.figures["reward/total"]
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-6)
    assert ours.first == pytest.approx(theirs.first, abs=1e-6)

    # once more: nothing is run, and the lines are enough for the same table
    before = lines()
    for run in runs():
        shutil.rmtree(run.parent)
    code, again = sweep("--seeds=0..1", TWO)
    assert (code, shown(again)) == (0, shown(text))
    assert "4 of them done" in again
    assert "begins" not in again
    assert (SWEEP / "table.txt").read_text().strip() == shown(text).strip()
    assert lines() == before

    # it grows by what is not there yet
    code, text = sweep("--seeds=0", "--set=model.estimator=OutcomeOnly,TurnLevel,Merged")
    assert re.findall(r"begins  (.*)", text) == ["estimator=Merged, seed 0"]
    assert len(lines()) == 5


@pytest.mark.slow
def test_a_failed_run_is_reported_stops_no_other_and_is_tried_again(sweep):
    words = ("--set=model.rollout.tools=[worlds.Echo],[test_sweep.Mended]", "--jobs=1")
    code, text = sweep(*words)
    assert code == 1
    assert "done    tools=[worlds.Echo], seed 0" in text
    assert "FAILED  tools=[test_sweep.Mended], seed 0: exit code 1. " in text
    assert "          | turnrl: ToolError: " in text
    assert r"the world is \x1b[31mbroken" in text  # nothing that a terminal would obey
    (log,) = re.findall(r"the whole log: (.*)", text)
    assert "Traceback" not in text
    assert "the world is" in Path(log).read_text()
    assert "Not finished, and in no figure: 1 run." in text
    assert [line["settings"] for line in lines()] == [{"model.rollout.tools": "[worlds.Echo]"}]
    Path("mended").touch()
    code, text = sweep(*words)
    assert code == 0
    assert "begins  tools=[worlds.Echo]" not in text
    assert "tools=[test_sweep.Mended], seed 0\n" in text
    assert "Not finished" not in text
    assert len(lines()) == 2


@pytest.mark.slow
def test_a_sweep_that_was_killed_before_a_line_was_written_trains_nothing_again(sweep):
    words = ("--seeds=3,5", "--trainer.max_epochs=1")
    assert sweep(*words)[0] == 0
    before = lines()
    (SWEEP / "results.jsonl").unlink()
    code, text = sweep(*words)
    assert code == 0
    assert "resumes seed 3" in text
    assert lines() == before
    assert len(runs()) == 2


@pytest.mark.slow
def test_results_can_be_kept_in_a_file_apart_from_the_runs(sweep):
    words = ("--trainer.max_epochs=1", "--results=kept/lines.jsonl")
    code, text = sweep(*words)
    assert (code, len(runs())) == (0, 1)
    assert not (SWEEP / "results.jsonl").exists()
    assert len(Path("kept", "lines.jsonl").read_text().splitlines()) == 1
    # another folder, as of another clone, has nothing left to do
    code, again = sweep(*words, "-o", "elsewhere")
    assert (code, shown(again)) == (0, shown(text))
    assert "begins" not in again
    assert sorted(path.name for path in Path("elsewhere").iterdir()) == ["sweep.lock", "table.txt"]


# ---------------------------------------------------------------------------- killed and stopped

LONG = (
    *("--seeds=0..1", "--trainer.max_epochs=6", "--jobs=2"),
    "--model.rollout.tools=[test_sweep.Watched]",
)


def kill(running, folder=SWEEP):
    """Kill a sweep with -9, and wait until none of its runs is left."""
    running.kill()  # kills the stand-in; the nursery notices within a moment
    running.wait()
    if Path(folder).is_dir():
        with FileLock(Path(folder, "sweep.lock"), timeout=5):
            pass
    wait_until(lambda: not alive(), within_s=5)


def iterations(folder=SWEEP):
    """The most iterations that a run of the sweep has kept."""
    kept = [0]
    for file in Path(folder).glob("*/version_*/metrics.csv"):
        with contextlib.suppress(FileNotFoundError):  # its attempt is being joined with another
            rows = csv.DictReader(file.read_text().splitlines())
            kept += [int(row["iteration"]) for row in rows]
    return max(kept)


@pytest.mark.slow
def test_a_sweep_that_is_killed_twice_ends_as_if_nothing_had_happened(start, sweep):
    assert sweep(*LONG, "-o=whole")[0] == 0
    whole = Path("whole/table.txt").read_text()
    shutil.rmtree("pids")

    first = start(*LONG)
    wait_until(lambda: iterations() >= 2)
    assert len(alive()) == 2
    kill(first)
    assert lines("whole") != []
    assert not (SWEEP / "results.jsonl").exists()

    second = start(*LONG)
    wait_until(lambda: iterations() >= 4)
    os.kill(int(alive()[0].name), signal.SIGKILL)
    assert second.wait(120) == 1
    text = Path("sweep.out").read_text()
    assert len(re.findall(r"resumes seed [01]\n", text)) >= 1, text
    assert len(re.findall(r"FAILED  seed [01]: killed by SIGKILL, as by the system if", text)) == 1
    assert len(lines()) == 1

    code, text = sweep(*LONG)
    assert code == 0
    assert "1 of them done" in text
    assert any("Restored all states" in log.read_text() for log in SWEEP.glob("*/log.txt"))
    assert (SWEEP / "table.txt").read_text() == whole
    assert lines() == lines("whole")
    assert [run.name for run in runs()] == ["version_0"] * 2
    for mine, theirs in zip(runs(), runs("whole"), strict=True):
        assert figures(mine) == figures(theirs)
        names = [sorted(p.name for p in Path(run, "record").iterdir()) for run in (mine, theirs)]
        assert names[0] == names[1]
        assert len(figures(mine)) == 7


def test_a_stopped_sweep_stops_its_runs_and_two_sweeps_cannot_share_a_folder(start, capsys):
    running = start(*LONG)
    wait_until(lambda: iterations() >= 1)
    message = fails(capsys, ["sweep", "recipe.yaml", *LONG[:2], "--jobs=1"])
    assert f"another sweep is at work in '{SWEEP}'. Wait until it ends, or give another" in message
    running.send_signal(signal.SIGINT)
    assert running.wait(30) == 128 + signal.SIGINT
    assert not alive()
    text = Path("sweep.out").read_text()
    assert "0 of 2 runs are done. Repeat the command to resume." in text
    assert "Traceback" not in text
    for log in SWEEP.glob("*/log.txt"):
        text_of_run = log.read_text()
        assert "stopped by SIGTERM" in text_of_run
        assert "is kept" in text_of_run


# ------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--seeds=4..0"], "--seeds is '4..0'"),
        (["--seeds=0..2,1"], "names a seed twice"),
        (["--set=model.estimator=OutcomeOnly,Turnlevel"], "Did you mean TurnLevel"),
        (["--set=model.optimizer.lr=1e-3,0.001"], "are the same recipe. Leave one out."),
        (["--set=seed_everything=1,2"], "Give --seeds 0..4"),
        (["--ckpt_path=recipe.yaml"], "'recipe.yaml' is not a checkpoint"),
        (["--trainer.fast_dev_run=true"], "trainer.fast_dev_run is a trial"),
        (["--jobs=0"], "--jobs is 0; it must be 1 or more."),
        (["-o=recipe.yaml/x"], "recipe.yaml is a file"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_reported_before_any_run_starts(recipe, capsys, words, wanted):
    message = fails(capsys, ["sweep", "recipe.yaml", *words])
    assert wanted in message
    assert not list(Path().glob("runs/*/*/version_*"))


# -------------------------------------------------------------------------------- the matrix


def digests(*words, sets=()):
    return [cell.digest for cell in matrix.read_cells(["recipe.yaml", *words], "0", sets)[1]]


def test_runs_come_seed_by_seed_so_that_settings_can_be_compared_early(recipe):
    sets = ["model.estimator=OutcomeOnly,TurnLevel", "model.group_size=2,4"]
    _, cells = matrix.read_cells(["recipe.yaml"], "0..1", sets)
    assert [str(cell) for cell in cells[:5]] == [
        "estimator=OutcomeOnly, group_size=2, seed 0",
        "estimator=OutcomeOnly, group_size=4, seed 0",
        "estimator=TurnLevel, group_size=2, seed 0",
        "estimator=TurnLevel, group_size=4, seed 0",
        "estimator=OutcomeOnly, group_size=2, seed 1",
    ]
    assert len({cell.name for cell in cells}) == len(cells) == 8
    assert len({cell.digest for cell in cells}) == 4


def test_a_digest_depends_on_the_training_settings_not_on_spelling_or_folders(recipe):
    (own,) = digests()
    assert digests("--seed_everything=7", "--trainer.logger=CSVLogger") == [own]
    assert digests("--model.optimizer.lr=0.001", "--model.group_size=4") == [own]
    assert digests("--model.group_size=5") != [own]
    save(recipe | {"data": recipe["data"] | {"val_limit": 2}})
    assert digests() != [own]
    estimators = ["model.estimator=Merged,{class_path: TurnLevel, init_args: {turn_coef: 2}}"]
    assert len({*digests(sets=estimators)}) == 2
    assert digests("--model.estimator={class_path: Merged}") == digests("--model.estimator=Merged")


def test_seeds_and_values_are_parsed():
    assert matrix.read_seeds("0..3,7") == [0, 1, 2, 3, 7]
    assert matrix.read_set("model.group_size=4,8,16") == ("model.group_size", ["4", "8", "16"])
    text = "a={class_path: X, init_args: {b: [1, 2]}},[c, d],don't,e"
    values = ["{class_path: X, init_args: {b: [1, 2]}}", "[c, d]", "don't", "e"]
    assert matrix.read_set(text) == ("a", values)


def test_a_setting_may_be_a_recipe(recipe):
    save({"model": {"group_size": 8}}, "many.yaml")
    save({"model": {"group_size": 2}}, "few.yaml")
    _, cells = matrix.read_cells(["recipe.yaml"], "0", ["config=many.yaml,few.yaml"])
    sizes = [build(cell.words(Path("there"))).module.group_size for cell in cells]
    assert sizes == [8, 2]
    assert [cell.name[:21] for cell in cells] == ["config_many.yaml-seed", "config_few.yaml-seed_"]


def test_a_run_keeps_the_other_loggers_of_its_recipe(recipe):
    other = {"class_path": "CSVLogger", "init_args": {"save_dir": "runs", "name": "other"}}
    recipe["trainer"]["logger"] = ["CSVLogger", other]
    save(recipe)
    _, (cell,) = matrix.read_cells(["recipe.yaml"], "3", [])
    made = build(cell.words(Path("there"))).trainer.loggers
    places = [f"there/{cell.name}/version_0", f"there/{cell.name}/other/version_0"]
    assert [logger.log_dir for logger in made] == places


# -------------------------------------------------------------------------------------- cores


def test_cores_are_divided_and_runs_on_a_gpu_come_one_by_one(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    assert jobs.share_cores(None, "cpu") == (8, 1)
    assert jobs.share_cores(3, "cpu") == (3, 2)
    assert jobs.share_cores(None, "cuda") == (1, 8)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert jobs.share_cores(2, "cpu") == (2, 5)


# ------------------------------------------------------------------------------------- results


def a_line(digest="d", seed=0, matches=(0.0, 0.5, 1.0), tokens=(0, 100, 200), **settings):
    curves = {"iteration": [0, 1, 2], "step": [0, 1, 2], "seconds": [0, 1, 2]}
    return {
        **{"digest": digest, "seed": seed, "settings": settings, "recipe": "r"},
        **{"turnrl": "0.8.0", "threads": 1, "ended": "2026-01-01T00:00:00+00:00"},
        "curves": curves | {"sampled_tokens": [*tokens], "val/exact_match": [*matches]},
    }


@pytest.mark.parametrize(
    "broken",
    [
        '{"digest": "d", "se',
        json.dumps(a_line() | {"curves": {"iteration": [0], "sampled_tokens": [0, 1]}}),
        json.dumps(a_line(matches=("0", 1, 2))),
        "\udcff",
    ],
)
def test_a_broken_line_is_reported_and_counts_for_no_run(tmp_path, broken):
    good = [json.dumps(a_line(seed=seed)) for seed in (0, 1)]
    file = tmp_path / "results.jsonl"
    file.write_text("\n".join([good[0], broken, good[1]]), "utf-8", "surrogateescape")
    read, problems = results.read_results(tmp_path)
    assert sorted(read) == [("d", 0), ("d", 1)]
    assert problems == [f"ignored line 2 of {file}, which is torn or broken."]
    # a line is added behind what is there, and a torn end gives way to it
    results.append_result(file, read["d", 0])
    assert file.read_bytes().splitlines()[1] == broken.encode("utf-8", "surrogateescape")
    assert len(file.read_text("utf-8", "surrogateescape").splitlines()) == 4
    file.write_text(f"{good[0]}\n{good[1][:-9]}")
    results.append_result(file, read["d", 1])
    assert [json.loads(line)["seed"] for line in file.read_text().splitlines()] == [0, 1]


def test_curves_count_every_sampled_token_and_every_part_of_an_iteration():
    rows = [
        {"iteration": 0, "step": 0, "val/exact_match": 0.1},
        {"iteration": 1, "step": 4, "rollout/tokens_per_s": 50.0, "rollout/seconds": 2.0}
        | {"rollout/scoring_seconds": 0.5, "train/seconds": 0.5},
        {"iteration": 2, "step": 8, "rollout/tokens_per_s": 30.0, "rollout/seconds": 1.0}
        | {"rollout/scoring_seconds": 1.0, "train/seconds": 2.0, "reward/total": 1.0}
        | {"val/exact_match": 1 / 3, "val/format": 1.0}
        | {"train/tool_execution": 0.5, "famous/exact_match": 0.75},
    ]
    assert results.read_curves(rows) == {
        **{"iteration": [0, 2], "step": [0, 8], "sampled_tokens": [0, 130], "seconds": [0, 7]},
        **{"val/exact_match": [0.1, 0.333333333], "val/format": [None, 1]},
        **{"train/tool_execution": [None, 0.5], "famous/exact_match": [None, 0.75]},
    }
    assert results.read_curves(rows[1:2]) == {}
    # a share that a row does not tell is not nothing
    for name, unknown in (
        ("train/seconds", "seconds"),
        ("rollout/scoring_seconds", "seconds"),
        ("rollout/tokens_per_s", "sampled_tokens"),
    ):
        less = [rows[0], {k: v for k, v in rows[1].items() if k != name}, rows[2]]
        assert results.read_curves(less)[unknown] == [0, None]


# --------------------------------------------------------------------------------- the table


def test_the_area_averages_trapezoids_up_to_the_end_that_every_run_reached():
    points = [(0, 0.0), (100, 0.5), (200, 1.0)]
    # 100 * (0 + .5) / 2 + 50 * (.5 + .75) / 2 = 25 + 31.25, over 150
    assert results.area_under_curve(points, 150) == pytest.approx(56.25 / 150)
    assert results.area_under_curve(points, 200) == pytest.approx(0.5)


def read_back(lines):
    """The results that these lines become in a file."""
    folder = Path("read-back")
    folder.mkdir(exist_ok=True)
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return results.read_results(folder)[0]


def tabulated(seeds, ends, curves=lambda cell: {}):
    """A table of runs by their last exact match, by group size and seed."""
    sets = [f"model.group_size={','.join(ends)}"]
    _, cells = matrix.read_cells(["recipe.yaml"], seeds, sets)
    finished = []
    for cell in cells:
        if (end := ends[cell.settings["model.group_size"]].get(cell.seed)) is not None:
            line = a_line(*cell.key, matches=(0, 0, end))
            line["curves"] |= curves(cell)
            finished.append(line)
    return table.tabulate(cells, read_back(finished))


def test_without_answers_the_table_shows_the_reward(recipe):
    _, cells = matrix.read_cells(["recipe.yaml"], "0..2", ["model.group_size=2,4"])
    finished = []
    for cell in cells:
        line = a_line(*cell.key, matches=(0, 0, 0))
        del line["curves"]["val/exact_match"]
        end = -1.5 + cell.seed / 4 + (cell.settings["model.group_size"] == "4")
        rewards = {"val/reward/total": [end - 1, end, end], "val/reward/outcome": [0, 0.5, 1]}
        line["curves"] |= rewards | {"val/reward/turn": [0, 0, 0]}
        finished.append(line)
    made = table.tabulate(cells, read_back(finished))
    assert made.rows[0].values["area"] == pytest.approx({s: -1.75 + s / 4 for s in range(3)})
    assert made.rows[1].gains["area"].change == pytest.approx(1)
    assert {*made.rows[0].values} == {"area", "reward/outcome", "reward/total"}
    assert "area is the average of reward/total over the first" in "\n".join(made.lines())


def test_intervals_are_students_over_seeds_and_differences_are_paired(recipe):
    ends = {"2": {0: 0.4, 1: 0.2, 2: 0.6}, "4": {0: 0.8, 1: 0.4, 2: 1.0}, "8": {0: 0.5}}
    made = tabulated("0..2", ends)
    low, high = student_interval([0.4, 0.2, 0.6])
    gain = made.rows[1].gains["exact_match"]
    assert gain == difference_over_seeds([0.4, 0.2, 0.6], [0.8, 0.4, 1.0])
    text = [*made.lines()]
    assert max(map(len, text)) <= 80
    assert text[2] == "C  model.group_size=8: seed 0"
    place = text.index(f"exact_match       A   0.400  [{low:.3f}, {high:.3f}]")
    assert f"[{gain.low:+.3f}, {gain.high:+.3f}]" in text[place + 1]
    assert text[place + 2] == f"{'':18}C   0.500"
    assert "Not finished, and in no figure: 2 runs." in text
    # of the seeds that both settings have, 1 and 3
    ends = {"2": {0: 0.1, 1: 0.3, 3: 0.2}, "4": {1: 0.4, 2: 0.9, 3: 0.4}}
    assert tabulated("0..3", ends).rows[1].gains["exact_match"].pairs == 2
