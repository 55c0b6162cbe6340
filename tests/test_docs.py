"""What the documents promise: whatever can be copied from a page is run, as it stands there.

`CLAIMS` says of every command and block how it is tested, or why it is not. The commands of a page
are typed one after the other in a terminal, in a folder with `recipes/` in it, because the later
ones use what the earlier ones leave. The recipe there is small (`SMALL`); what is typed is not
changed.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import gc
import importlib
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from markdown_it import MarkdownIt

from nursery import Nursery, command
from pages import ROOT, Done, Piece, Terminal, pieces, snippet_of
from turnrl import (
    Fields,
    OutcomeOnly,
    Reading,
    ToolCall,
    Trajectory,
    Turn,
    TurnLevel,
    build,
    load_questions,
)
from turnrl.cli import main
from turnrl.testing import check_tool
from turnrl_atlas import Atlas

PAGES = [
    "README.md",
    *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md")),
    "recipes/README.md",
    *sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("plugins/*/README.md")),
]


@dataclass(frozen=True)
class Runs:
    """It is run: a command in bash, Python in an interpreter of its own, YAML as a
    second recipe, whose settings are printed (`Fits` does the same more quickly, but imports here
    what it names). It ends with 0, without a traceback and without warnings.

    Args:
        says: What the terminal then shows.
        leaves: Files that are there afterwards.
        notebook: A block of Python that also runs as a cell in a Jupyter kernel.
        slow: Not in the default run.
        alone: In a new folder, as it is an alternative to the command before it.
        clone: In a clone of the repository, without what this environment has installed.
        server: It needs a search server, whose address stands in for that of the page.
        before, after: What is typed in addition.
    """

    says: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    notebook: bool = False
    slow: bool = False
    alone: bool = False
    clone: bool = False
    server: bool = False
    before: str = ""
    after: str = ""

    @property
    def at_once(self) -> bool:
        """Whether it is run with the page, and not when its test comes."""
        return not (self.slow or self.clone or self.server)


@dataclass(frozen=True)
class Fits:
    """Options that `turnrl fit recipes/quickstart.yaml` accepts, or YAML that stands in a recipe;
    every word and number of it is then in the recipe with all settings resolved.

    Args:
        under: The section in which the YAML stands, `model.rollout` say.
        plugin: The package whose components it names, if that is not installed.
    """

    under: str = ""
    plugin: str = ""


@dataclass(frozen=True)
class Lists:
    """A list of files: those in this folder of the page."""

    folder: str


@dataclass(frozen=True)
class Printed:
    """What this prints at the end of its page: the command itself, or words of it or of a block of
    the page."""

    by: str
    slow: bool = False


@dataclass(frozen=True)
class Saved:
    """A file that the reader saves beside the recipe, before the commands are typed."""

    name: str


@dataclass(frozen=True)
class Elsewhere:
    """A test elsewhere runs it, or compares it with a file that is run."""

    by: str


@dataclass(frozen=True)
class NotRun:
    """It cannot be run here, for this reason."""

    reason: str


Claim = Runs | Fits | Lists | Printed | Saved | Elsewhere | NotRun

CREDIT_TABLE = "TURNRL_LOAD_PLUGINS=estimators turnrl credit-check"
LAST = "runs/quickstart/version_0/checkpoints/last.ckpt"
BUILD = "turnrl index build --source"
FINISHED = 'ask it: turnrl.load("'
SEEN = "see what it does: turnrl report "
LEARNED = "test_warmup.test_the_lake_of_gymnasium_on_the_page_is_learned"
"""How a run in an environment ends."""
NOTHING_LEFT = "this run is finished"
FULL_SIZE = Elsewhere("test_docs.test_the_full_size_tutorial_prints_the_output_it_shows")
COMPARED = Elsewhere("test_bench.test_comparison_commands_on_the_page_exist_in_the_script")
TESTS = Runs(("tests collected",), clone=True, slow=True, after=" --collect-only")
AS_IN_README = Elsewhere("test_docs.test_everything_shown_on_the_sites_first_page_is_in_the_readme")
SHOWN_FILE = Elsewhere("test_plugins.test_the_code_on_the_plugins_page_matches_its_files")
EXAMPLE = Elsewhere("test_plugins.test_the_examples_in_the_docs_run")
TAUGHT = Elsewhere("test_docs.test_the_policy_learns_the_calculator_as_the_page_shows")
CALCULATOR = "test_docs.test_the_calculator_and_the_rows_of_the_page_fit_together"
FROM_PYTHON = "test_ask.test_a_run_from_python_is_loaded_by_any_door_into_a_module_or_by_a_recipe"
NAMED = "test_recipes.test_every_command_accepts_a_recipe_by_name"
LISTED = "test_recipes.test_every_recipe_is_listed_with_its_command_and_its_row"
COPIED = "test_recipes.test_a_copy_is_a_file_to_change_and_replaces_none"
BY_DOORS = "test_a_run_from_python_is_loaded_by_any_door_into_a_module_or_by_a_recipe"
LAKE = "test_action.test_the_lake_of_the_page_runs_and_warns_that_nothing_ends"
WARMUP = "test_warmup.test_"
SERVER = "test_openenv.test_the_recipe_of_the_page_runs"
ARENA = "test_games.test_a_game_of_textarena_is_won"
MACHINES = "test_machines.test_devices_torchrun_and_slurm_are_the_same_run"
QUEST = "test_games.test_a_quest_of_textworld_is_won"
PAPER = Elsewhere("test_cli.test_each_of_the_papers_baselines_is_the_recipe_with_another_estimator")

# By page: what stands in a command or block (the longest text decides), and how it is tested.
CLAIMS: dict[str, dict[str, Claim]] = {
    "README.md": {
        "pip install . &&": Runs((FINISHED,), (LAST,), clone=True, slow=True),
        "OutcomeOnly": Runs((FINISHED,), clone=True, slow=True),
        "compare runs/quickstart/version_0": Runs(
            ("turnrl.TurnLevel -> turnrl.OutcomeOnly",),
            after=" --iteration 2",  # the small run has no more
            clone=True,
            slow=True,
        ),
        "turnrl report runs": Runs(
            ("written to report.html",), ("report.html",), clone=True, slow=True
        ),
        "Qwen/Qwen2.5-1.5B": Fits(),
        'turnrl.load("runs': Runs(("What is the time zone of Utrecht?",), notebook=True),
        "pytest -q": TESTS,
    },
    "docs/contributing.md": {
        "pytest -q -n auto": TESTS,
        "pytest -q -m slow": TESTS,
        "ruff check": Runs(("no issues found",), clone=True, slow=True),
        "tests/oldest.py": Elsewhere(
            "test_oldest.test_lower_bounds_include_optional_groups_and_skip_other_pythons"
        ),
        "sphinx-build": Elsewhere("test_site.built"),
    },
    "docs/howto/index.md": {
        "--trainer.devices 2": Runs(("MEMBER: 2/2", FINISHED), slow=True),
        "max_epochs 50 --ckpt_path": Runs(("max_epochs: 2 -> 50", "iteration   3/50"), slow=True),
        "turnrl eval": Runs(("8 questions, greedy", "val/exact_match", "every trajectory in")),
        "compare quickstart@0": Runs(("8 questions in common", "See them: turnrl report")),
        "turnrl sweep": Runs(("10 runs (2 settings x 5 seeds)", "area "), slow=True),
        "turnrl report": Runs(("written to report.html",), ("report.html",)),
        "turnrl play": Runs(("question   What country is Utrecht in?", "-- turn 1", "answer ")),
        "turnrl recipes": Elsewhere(LISTED),
        "turnrl recipes copy": Runs(("turnrl fit quickstart.yaml",), ("quickstart.yaml",)),
        "turnrl credit-check": Elsewhere(
            "test_estimators.test_the_table_has_every_installed_estimator_within_80_columns"
        ),
        "turnrl plugins": Runs(("segmenters  (turnrl", "WikiSearch")),
        "turnrl doctor": Runs(("pass  tool search", "pass  learning"), slow=True),
        "plugin new weather": Runs(("Next:",), ("turnrl-weather/recipe.yaml",)),
        "turnrl index search": Runs(("Utrecht is a city",)),
        "turnrl fit --help": Runs(("--model.group_size", "--data.train_limit"), slow=True),
        "rewards.help ExactMatch": Runs(("weight if the given answer is an acc",), slow=True),
        "--key value": NotRun("a placeholder"),
        "turnrl --help": Runs(("warmup", "export", "bench")),
    },
    "docs/changelog.md": {
        "--model.estimator TurnLevel": Fits(),
        "--trainer.callbacks+": Fits(),
        "--trainer.profiler pytorch": Fits(),
        "--record.per_iteration 0": Fits(),
        "turnrl --help": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "turnrl warmup RECIPE": Elsewhere(WARMUP + "mistakes_in_warm_up_options_are_reported"),
        "plugin new --with tool": Elsewhere(
            "test_scaffold.test_a_tool_comes_with_questions_that_it_knows_the_answers_to"
        ),
        "--model.optimizer torch.optim.SGD": Fits(),
        "pip install 'turnrl[gpu]'": NotRun("the package index; the tests use what is installed"),
        "turnrl play --estimators": Elsewhere(
            "test_play.test_play_prints_the_credit_that_each_estimator_would_give"
        ),
        "turnrl play RECIPE": Elsewhere(FROM_PYTHON),
        "turnrl eval RECIPE": Elsewhere(FROM_PYTHON),
        "turnrl report --watch": Elsewhere(
            "test_report.test_a_report_is_rewritten_while_its_run_continues"
        ),
        "pip install -e .": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "turnrl doctor RECIPE": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "plugin new --with engine": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "turnrl credit-check": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "turnrl completion": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "plugin new NAME": Elsewhere("test_scaffold.test_a_package_has_its_own_name_everywhere"),
        "OutcomeOnly": Fits(),
        "--ckpt_path last": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "python -m turnrl": Runs(("segmenters  (turnrl",), after=" plugins"),
        "turnrl fit recipes": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "index build | info | search": NotRun(
            "three names, each in docs/howto/wikipedia-search.md"
        ),
    },
    "docs/does-turn-credit-help/index.md": {
        "study.py": Elsewhere(
            "test_study.test_a_study_that_is_killed_resumes_and_ends_with_the_same_tables"
        ),
        "--seeds": Elsewhere("test_study.test_a_part_can_be_run_for_a_few_of_its_seeds"),
        "--draw": Elsewhere("test_study.test_a_folder_of_your_own_has_only_your_figures"),
    },
    "docs/does-turn-credit-help/plan.md": {},
    "docs/explanation/credit.md": {
        "z(x) = (x - baseline)": Elsewhere(
            "test_credit.test_turn_level_equals_its_equation_written_as_loops"
        ),
        "g = 1/G sum_i": Elsewhere("test_estimators.test_the_exact_figures_match_sampled_groups"),
        "bias       |E[g]": Elsewhere(
            "test_estimators.test_the_exact_figures_match_sampled_groups"
        ),
        "LOAD_PLUGINS=estimators": Runs(("TurnCritic: exact values",), slow=True),
        "turnrl credit-check --toy costs": Runs(("TurnCritic: exact values",), slow=True),
        "A_{i,k} = outcome_coef z(R)_i + turn_coef": Elsewhere(
            "test_costs.test_costs_among_right_equals_its_equation_written_as_loops"
        ),
        "d_k E[R + sum": Elsewhere(
            "test_costs.test_unscaled_it_estimates_the_gradient_that_its_page_gives"
        ),
        "  for costs among right answers": Printed(f"{CREDIT_TABLE} --toy costs", slow=True),
        "bias   along   angle": Printed(CREDIT_TABLE, slow=True),
        "turnrl credit-check": Runs(("signal to noise", "model.estimator"), slow=True),
        "quickstart.yaml --ckpt_path": Runs(
            ("signal to noise",), slow=True, before="turnrl fit recipes/quickstart.yaml && "
        ),
        "--json": Elsewhere("test_estimators.test_json_output_is_one_object_per_line"),
        "SNR = mean": Elsewhere("test_estimators.test_signal_is_the_agreement_of_two_groups"),
    },
    "docs/design.md": {
        "atlas         segmenters": Elsewhere(
            "test_layers.test_the_design_names_every_plugin_that_takes_names_of_another"
        ),
        "turnrl credit-check": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "errors      every": Elsewhere(
            "test_layers.test_the_list_of_rooms_names_every_module_and_folder_and_no_other"
        ),
        "turnrl-segmenters  ": Elsewhere("test_layers.test_the_design_lists_every_plugin"),
        "recipe/fit.py": Elsewhere("test_layers.test_the_walk_of_a_question_names_what_is_there"),
    },
    "docs/howto/alarms.md": {
        "iteration   5/40": Elsewhere(
            "test_alarms.test_a_run_that_went_wrong_raises_its_alarms_where_they_began"
        ),
        "turn/first_hit pays": Elsewhere(
            "test_earnings.test_a_run_says_once_whether_calls_pay_off"
        ),
        "turnrl.Alarms, init_args": Fits(),
        "from turnrl import alarms": Elsewhere(
            "test_alarms.test_the_example_on_the_page_reads_a_run"
        ),
    },
    "docs/howto/calculator.md": {
        '"""A calculator for whole': Saved("calculator.py"),
        "from calculator import Calculator": Runs(("cannot compute",)),
        "-86": Printed("from calculator import Calculator"),
        "tools: [calculator.Calculator]": Saved("calculator.yaml"),
        "turnrl fit": Runs((FINISHED,), ("runs/calculator/version_0/metrics.csv",)),
        "iteration   1/20": TAUGHT,
        "agent.ask": Runs(("What is 52 minus 62 minus 76?", "-- turn 1")),
        "result: -86": TAUGHT,
    },
    "docs/howto/compare.md": {
        "turnrl fit recipes/quickstart.yaml": Runs((FINISHED,)),
        "turnrl fit recipes/quickstart.yaml --model.estimator OutcomeOnly": Runs(
            (FINISHED,), slow=True
        ),
        "version_0 runs/quickstart/version_1": Runs(
            ("8 questions in common", "turnrl.TurnLevel -> turnrl.OutcomeOnly"), slow=True
        ),
        "val: 256 questions": NotRun("two runs of 40 iterations, each some five minutes"),
        "quickstart@0 quickstart": Runs(("A  quickstart@0, iteration 0, the baseline",)),
        "quickstart@0 quickstart --all": Runs(("8 questions in common",)),
        "quickstart@0 quickstart --json": Runs(('{"first": [{"run": ',)),
        "turnrl fit recipes/quickstart.yaml --seed_everything": Runs((FINISHED,), slow=True),
        "version_*": Runs(("Student's t over 5 seeds",), slow=True),
        "turnrl eval RECIPE": NotRun("a placeholder"),
    },
    "docs/howto/functions.md": {
        '"""A tool and a reward': Saved("places.py"),
        "tools: [places.search]": Saved("places.yaml"),
        "turnrl fit quickstart places.yaml": Runs((FINISHED,), ("runs/places/version_0/model",)),
        "class_path: FunctionTool": Runs(("timeout_s: 120",)),
        "class_path: FunctionReward": Runs(("weight: 0.5",)),
        '"""Questions about sums': Saved("sums.py"),
        "train: sums.sums": Runs(("sums.sums",)),
    },
    "docs/howto/coming-from.md": {
        '"""Rows and a reward function': Saved("mine.py"),
        "rewards: [ToolExecuted, mine.accuracy]": Saved("mine.yaml"),
        "turnrl fit quickstart mine.yaml": Runs(
            (FINISHED,), ("runs/mine/version_0/model",), slow=True
        ),
        "--trainer.devices 2": Fits(),
    },
    "docs/howto/gsm8k.md": {
        "Tom has 6 boxes": Elsewhere(CALCULATOR),
        '"""A calculator': Elsewhere(CALCULATOR),
        "answer_pattern: '####": Elsewhere(CALCULATOR),
        "fit gsm8k.yaml --model": Runs(
            (FINISHED,), ("runs/gsm8k/version_0/metrics.csv",), slow=True
        ),
        "turnrl doctor gsm8k": NotRun("the hub; test_doctor.py has smaller recipes"),
        "turnrl fit gsm8k": NotRun("the hub and a GPU; the command before it needs neither"),
    },
    "docs/howto/questions.md": {
        "--data.train questions.jsonl": Runs((FINISHED,), slow=True),
        "- {id: utrecht": Fits(),
        "--data.fields": Fits(),
        "class Ladder(IterationData)": Elsewhere(
            "test_training.test_a_custom_data_module_trains_if_it_gives_each_iterations_questions"
        ),
        "answers: {class_path: Number": Fits(),
        "index build": Runs(("300 passages",), ("indexes/mine",)),
        "index search --questions": Runs(("answer@5",)),
        "--data.val questions.jsonl \\": Runs(("8 questions, greedy",)),
        "rows.shuffle(seed=1)": Runs(("Question(id=",)),
        "answer_pattern '####": Fits(),
    },
    "docs/howto/report.md": {
        "turnrl report quickstart": Elsewhere("test_report.test_runs_are_reported_by_name"),
        "turnrl report runs/turn_level": Elsewhere("test_report.test_runs_are_reported_by_name"),
        "+0.641 = -0.21": NotRun("numbers of one run"),
        "value                 ": NotRun("numbers of one run"),
        "@compares.register": Elsewhere("test_why.test_your_own_estimator_can_be_explained"),
        "turnrl report --watch": Elsewhere(
            "test_report.test_a_report_is_rewritten_while_its_run_continues"
        ),
        "--trajectories 500": Elsewhere("test_report.test_runs_are_reported_by_name"),
    },
    "docs/howto/notebook.md": {
        "turnrl.build(": Runs(("iteration   2/2", "-- turn 1"), notebook=True),
        "from IPython.display": Runs(("answer  outcome", "-- turn 1")),
        "%%writefile": Elsewhere("test_docs.test_a_tool_that_a_cell_writes_is_named_by_a_recipe"),
    },
    "docs/howto/runs.md": {
        "--trainer.callbacks+": Fits(),
        "--trainer.enable_progress_bar": Fits(),
        "turnrl play RECIPE": Elsewhere("test_ask." + BY_DOORS),
        "turnrl eval RECIPE": Elsewhere("test_ask." + BY_DOORS),
        "turnrl eval recipes/quickstart.yaml --ckpt_path best": Runs(
            ("8 questions, greedy",), slow=True
        ),
        "turnrl fit recipes/quickstart.yaml --ckpt_path last": Runs((NOTHING_LEFT,), slow=True),
        "--ckpt_path last": Elsewhere(
            "test_find_run.test_the_best_checkpoint_is_taken_or_else_the_last"
        ),
        "--checkpoint last": Elsewhere(
            "test_find_run.test_the_best_checkpoint_is_taken_or_else_the_last"
        ),
        "turnrl.BestCheckpoint": Fits(),
        "turnrl.Question(": Runs(("Trajectory('What is the time",), slow=True),
        "fit recipes/quickstart.yaml --ckpt_path": Runs(("Restored all states", FINISHED)),
        "resumes with changed": Printed(
            f"turnrl fit recipes/quickstart.yaml --model.optimizer.lr 0.0005"
            f" --trainer.max_epochs 80 --ckpt_path {LAST}",
            slow=True,
        ),
        "from turnrl import export": Runs((), ("best/README.md", "best/model.safetensors")),
        "pandas.read_csv": Runs(("iteration",)),
        "record.transcript(": Runs(("question   ", " questions")),
        "record.table(": Runs(("exact_match_mean", "train-00000")),
    },
    "docs/howto/sweep.md": {
        "--seeds 0..1 --set": Runs(
            ("4 runs (2 settings x 2 seeds)", "Student's t over seeds", "report of 4 runs"),
            ("runs/quickstart-sweep/results.jsonl", "runs/quickstart-sweep/table.txt"),
            slow=True,
        ),
        "A  model.estimator": NotRun("six runs of 10 iterations, each some minutes"),
        "--seeds 0": Elsewhere("test_sweep.test_seeds_and_values_are_parsed"),
        "--set model.group_size": Elsewhere("test_sweep.test_seeds_and_values_are_parsed"),
        "--set config": Elsewhere("test_sweep.test_a_setting_may_be_a_recipe"),
        "--jobs 2": Elsewhere("test_sweep.test_cores_are_divided_and_every_run_has_its_gpu"),
        "--devices": Elsewhere("test_sweep.test_cores_are_divided_and_every_run_has_its_gpu"),
        "--results": Elsewhere("test_sweep.test_results_can_be_kept_in_a_file_apart_from_the_runs"),
        "turnrl sweep --json": Elsewhere(
            "test_sweep.test_the_table_can_be_json_and_runs_can_be_listed_beforehand"
        ),
        "--trainer.max_epochs": Fits(),
        "scale: none": Runs(
            ("to do  estimator={class_path: TurnLevel, init_args: {baseline: leave",)
        ),
        "*/version_0": Runs(
            ("Student's t over 2 seeds", "turnrl.OutcomeOnly -> turnrl.TurnLevel"), slow=True
        ),
        "results.read": Runs(("{'model.estimator': 'OutcomeOnly'} 0 [(0, ",), slow=True),
    },
    "docs/howto/evaluate.md": {
        "turnrl.AlsoScore": Fits(),
        "turnrl fit": Runs((FINISHED,)),
        "turnrl eval recipes/quickstart.yaml": Runs(("no --ckpt_path", "8 questions, greedy")),
        "turnrl eval runs/quickstart/version_0": Runs(("checkpoints/best.ckpt", "val/f1")),
        # by default test_eval.test_each_data_set_has_its_lines_and_all_have_theirs
        "turnrl eval runs/quickstart/version_0 --questions": Runs(
            ("Atlas/exact_match", "held_out/turns", "overall/calls"), slow=True
        ),
        "turnrl eval runs/quickstart/version_0 --samples": Runs(
            ("8 questions, 8 sampled of each", "val/pass@4", "val/mean@8"), slow=True
        ),
        "turnrl eval runs/quickstart/version_0 --json": Runs((), ("figures.json",)),
        "turnrl eval recipes/quickstart.yaml --model.policy.model": Runs(("8 questions, greedy",)),
        "merge_and_unload": Elsewhere("test_eval.test_a_merged_adapter_is_scored_as_its_run"),
        "--endpoint '{base_url:": Elsewhere(
            "test_eval.test_a_checkpoint_beside_a_server_is_refused"
        ),
        "endpoint:": Elsewhere("test_eval.test_the_servers_may_stand_in_a_recipe_of_its_own"),
        "turnrl eval recipes/quickstart.yaml vendor.yaml": Elsewhere(
            "test_eval.test_the_servers_may_stand_in_a_recipe_of_its_own"
        ),
        "turnrl export": Elsewhere("test_eval.test_a_record_becomes_a_log_of_inspect_ai"),
        "inspect view": NotRun("it is inspect_ai's own"),
    },
    "docs/howto/settings.md": {
        "turnrl fit --help": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "turnrl recipes": Elsewhere(LISTED),
        "turnrl recipes copy": Runs(("turnrl fit mine_react.yaml",), ("mine_react.yaml",)),
        "turnrl fit quickstart": Elsewhere(NAMED),
        "quickstart.yaml mine.yaml": Runs(("quickstart.yaml + mine.yaml", FINISHED), slow=True),
        "echo 'trainer": Runs(("iteration   2/2", FINISHED)),
        "bitsandbytes.optim.AdamW8bit": Runs(("bitsandbytes.optim.AdamW8bit",), slow=True),
        "--model.optimizer.lr 2e-5": Fits(),
        "estimator.baseline leave_one_out": Runs((FINISHED,), slow=True),
        "estimator Branched": Runs((FINISHED,), slow=True),
        "estimator TurnCritic": Runs((FINISHED,), slow=True),
        "turnrl credit-check": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "chat_template qwen3": Fits(),
        "--model.policy.minibatch_tokens": Fits(),
        "gradient_checkpointing true": Fits(),
        "--model.policy.lora.r": Fits(),
        "--model.engine Slots": Fits(),
        "lockstep false": Fits(),
        "--data.val_limit": Fits(),
        "--trainer.check_val": Fits(),
        "TensorBoardLogger": Fits(),
        "--trainer.devices 2": Fits(),
        "[my_module.MyTool]": Fits(),
    },
    "docs/explanation/search-sizes.md": {
        "--split none": Runs(("300 passages",), before=f"{BUILD} corpus.jsonl --index i2 "),
    },
    "docs/howto/environments.md": {
        "class Library": Saved("library.py"),
        "environment: library.Library": Saved("library.yaml"),
        "turnrl fit quickstart library.yaml": Runs(
            (SEEN,), ("runs/library/version_0/model",), slow=True
        ),
        "pip install 'turnrl[environments]'": NotRun("the package index; it is installed"),
        "id: FrozenLake-v1": Saved("lake.yaml"),
        "turnrl fit quickstart lake.yaml --data": Elsewhere(LAKE),
        "turnrl warmup quickstart lake.yaml": Elsewhere(LEARNED),
        "turnrl fit quickstart lake.yaml --model": Elsewhere(LEARNED),
        "class Guess": Saved("guess.py"),
        "make: guess.Guess": Saved("guess.yaml"),
        "turnrl warmup quickstart guess.yaml": Runs(
            ("written to guess_starter",), ("guess_starter/config.json",), slow=True
        ),
        "turnrl fit quickstart guess.yaml": Runs(
            (SEEN,), ("runs/guess/version_0/model",), slow=True
        ),
        "pip install 'turnrl[openenv]'": NotRun("the package index; it is installed"),
        "url: http": Saved("server.yaml"),
        "turnrl fit quickstart server.yaml": Elsewhere(SERVER),
        "of: last_step": Fits(),
        "StepCost": Fits(),
        "no attempt of iteration 1": Elsewhere(LAKE),
        "turnrl sweep frozen_lake": NotRun("it takes an hour and a half"),
        "turnrl warmup frozen_lake": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "turnrl fit frozen_lake": Elsewhere(
            "test_warmup.test_the_frozen_lake_of_the_page_is_learned"
        ),
    },
    "docs/howto/warmup.md": {
        "turnrl warmup frozen_lake --to lake_starter": Runs(
            ("written to lake_starter", "begin with it: turnrl fit frozen_lake"),
            ("lake_starter/config.json",),
            slow=True,
            after=" --steps 20 --batch_size 8 --held_out 4",
        ),
        "turnrl fit frozen_lake": Runs(
            (SEEN,),
            ("runs/frozen_lake/version_0/model",),
            slow=True,
            after=" --trainer.max_epochs 1 --data.questions_per_iteration 2 --data.val_limit 4",
        ),
        "attempts with a call that worked": Elsewhere(
            "test_warmup.test_the_frozen_lake_of_the_page_is_learned"
        ),
        '"""A walker': Saved("walker.py"),
        "--by walker.demonstrate": Runs(
            ("written to walker_starter",),
            ("walker_starter/demonstrations.txt",),
            after=" --steps 2 --batch_size 4 --held_out 0",
            slow=True,
        ),
        "def write(self, reading": Elsewhere(WARMUP + "a_scheme_that_writes_as_on_the_page"),
        "warm_up(": Elsewhere(WARMUP + "the_python_of_the_page_warms_up"),
    },
    "docs/howto/games.md": {
        "pip install": NotRun("the package index"),
        "gem.print_envs()": NotRun("gem is not installed"),
        "make: gem.make": Elsewhere("test_games.test_a_game_of_gem_is_won"),
        "turnrl fit quickstart gem.yaml": NotRun("gem is not installed"),
        '"""A game of TextArena': Elsewhere(ARENA),
        "environment: arena.Game": Elsewhere(ARENA),
        "turnrl fit quickstart arena.yaml": NotRun("TextArena is not installed"),
        "tw-make": Elsewhere(QUEST),
        '"""Quests of TextWorld': Elsewhere(QUEST),
        "make: quest.Quest": Elsewhere(QUEST),
        "turnrl fit quickstart quest.yaml": NotRun("TextWorld is not installed"),
    },
    "docs/howto/players.md": {
        '"""A player in the embedded': Saved("searcher.py"),
        "player: searcher.Searcher": Saved("searcher.yaml"),
        "turnrl fit": Runs((FINISHED,), ("runs/searcher/version_0/metrics.csv",)),
        "turnrl play": Elsewhere("test_players.test_transcripts_and_play_show_what_a_player_sent"),
        "turnrl play runs/searcher": Runs(
            ("-- turn 1", "answer "), after=' "What country is Utrecht in?"'
        ),
        "asyncio.to_thread": Elsewhere(
            "test_players.test_a_failing_check_reports_what_it_saw_and_what_to_change"
        ),
        "player: my_module.PlainAgent": Fits(),
        "check_player(": Elsewhere("test_players.test_players_keep_to_the_contract"),
    },
    "docs/howto/gpu.md": {
        "pip install 'turnrl[gpu]'": NotRun("the package index; the tests use what is installed"),
        "turnrl doctor": NotRun("the hub and a search server; test_doctor.py has smaller recipes"),
        "--plan.profile 24GB": NotRun("the hub and a GPU; test_plan.py applies a profile"),
        "memory plan for": Elsewhere(
            "test_plan.test_the_tables_on_the_page_match_the_computed_plan"
        ),
        "first_gpu.sh  ": Elsewhere(
            "test_first_gpu.test_the_script_lists_its_steps_and_refuses_another"
        ),
        "first_gpu.sh all": Elsewhere(
            "test_first_gpu.test_the_script_continues_after_a_failure_and_reports_which_part_failed"
        ),
        "first_gpu.sh check": Elsewhere("test_first_gpu.test_a_step_is_rehearsed_on_a_cpu"),
        "--cuda 13.0": Elsewhere("test_first_gpu.test_kernels_of_other_cards_are_left_behind"),
        "pip list": Elsewhere(
            "test_first_gpu.test_the_packed_files_install_without_a_network_and_run"
        ),
        "first_gpu_pack.py": Elsewhere(
            "test_first_gpu.test_the_packed_files_install_without_a_network_and_run"
        ),
        "carried/install.sh": Elsewhere(
            "test_first_gpu.test_the_packed_files_install_without_a_network_and_run"
        ),
    },
    "docs/index.md": {
        "pip install . &&": AS_IN_README,
        "OutcomeOnly": AS_IN_README,
        "compare runs/quickstart/version_0": AS_IN_README,
        "turnrl report runs": AS_IN_README,
    },
    "docs/explanation/scale-out.md": {
        "pip install simpy": NotRun("the package index; the tests use what is installed"),
        "python docs/scale_out.py": Elsewhere(
            "test_scale_out.test_every_table_of_the_page_is_printed_by_the_command"
        ),
        "network.bytes_s=1.2e8 --cards 1,2,4": Elsewhere(
            "test_scale_out.test_the_command_of_the_page_takes_other_rates"
        ),
    },
    "docs/howto/several-machines.md": {
        "turnrl fit quickstart --trainer.devices 2": Elsewhere(MACHINES),
        "torchrun --nnodes": Elsewhere(MACHINES),
        "--nnodes": NotRun("an option of torchrun"),
        "--nproc_per_node": NotRun("an option of torchrun"),
        "--node_rank": NotRun("an option of torchrun"),
        "--signal=TERM@120": NotRun("an option of SLURM"),
        "srun turnrl": NotRun("SLURM; its variables are tried by " + MACHINES),
        "recipe.yaml servers.yaml --trainer.devices 2": Elsewhere(
            "test_server_processes.test_processes_that_learn_together_share_the_versions_of_the_first"
        ),
    },
    "docs/howto/vllm.md": {
        "install vllm": NotRun("vLLM has an environment of its own"),
        "--model.engine.help VLLM": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "arguments: [--gpu-memory-utilization": Fits(),
        "doctor recipe.yaml servers.yaml": Elsewhere(
            "test_server_engines.test_a_server_that_cannot_serve_is_refused_before_weights_load"
        ),
        "fit recipe.yaml servers.yaml": Elsewhere(
            "test_server_engines.test_a_run_trains_with_it_and_its_record_has_every_version"
        ),
        "--host 127.0.0.1": NotRun("an option of vLLM"),
        "--max-lora-rank": NotRun("an option of vLLM"),
        "--gpu-memory-utilization": NotRun("an option of vLLM"),
        "--max-loras": NotRun("an option of vLLM"),
        "--max-num-seqs": NotRun("an option of vLLM"),
        "--max-model-len": NotRun("an option of vLLM"),
        "--api-key": NotRun("an option of vLLM"),
        "--enable-lora": NotRun("an option of vLLM"),
        "--logprobs-mode": NotRun("an option of vLLM"),
        "turnrl doctor quickstart vllm.yaml": Elsewhere(
            "test_vllm_own_server.test_the_doctor_starts_a_server_with_a_small_model"
        ),
        "turnrl fit quickstart vllm.yaml": Elsewhere(
            "test_vllm_own_server.test_a_run_keeps_the_log_of_its_server"
        ),
        "turnrl eval servers --model.engine Slots": Elsewhere(
            "test_server_engines.test_a_run_that_sampled_ahead_is_evaluated_without_its_server"
        ),
        "recipe.yaml servers.yaml --trainer.devices 2": Elsewhere(
            "test_server_processes.test_processes_that_learn_together_share_the_versions_of_the_first"
        ),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": NotRun("vLLM has an environment of its own"),
        "url: [": Fits(),
    },
    "docs/howto/sglang.md": {
        "--model.engine.help SGLang": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "import turnrl; print(turnrl.Policy(": Runs(("starter",), slow=True),
        "sglang.launch_server": NotRun("SGLang has an environment of its own"),
        "url: [": Fits(),
        "doctor recipe.yaml servers.yaml": Elsewhere(
            "test_server_engines.test_a_server_that_cannot_serve_is_refused_before_weights_load"
        ),
        "fit recipe.yaml servers.yaml": Elsewhere(
            "test_server_engines.test_a_run_trains_with_it_and_its_record_has_every_version"
        ),
        "--": NotRun("an option of SGLang"),
    },
    "docs/explanation/performance.md": {
        "pip install 'turnrl[bench]'": NotRun("the package index; the tests use what is installed"),
        "compare.py trl": Elsewhere("test_bench.test_trl_and_turnrl_do_equal_work_in_a_small_case"),
        "vllm serve": NotRun("vLLM has an environment of its own"),
        "compare.py engine": COMPARED,
        "compare.py learn": COMPARED,
        "compare.py tools": COMPARED,
        "compare.py scale": Elsewhere(
            "test_bench.test_the_script_measures_a_collection_in_a_process_of_its_own"
        ),
        "turnrl bench gpu": Elsewhere(
            "test_bench_gpu.test_every_part_runs_without_a_gpu_and_every_case_is_there"
        ),
        "--": Elsewhere("test_bench.test_the_command_has_help_pages"),
    },
    "docs/howto/plugins.md": {
        "Patience(": Elsewhere("test_servers.test_the_example_of_the_page_waits"),
        "answers again": Elsewhere("test_servers.test_the_example_of_the_page_waits"),
        "turnrl credit-check": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "plugin new weather": Runs(("Next:",), ("turnrl-weather/turnrl_weather/estimator.py",)),
        "weather --with tool source": Runs(("with tool, source",), alone=True),
        "pyproject.toml       ": Lists("turnrl-weather"),
        "plugin new example": Elsewhere(
            "test_scaffold.test_a_package_called_example_is_the_template"
        ),
        "[project.entry-points.turnrl]": SHOWN_FILE,
        "turnrl plugins": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        '"""A tool: ': SHOWN_FILE,
        "class_path: ExampleLookup": Fits("model.rollout", plugin="turnrl_example"),
        "class Page(ForkableToolSession)": EXAMPLE,
        "class Walk(ForkableToolSession)": EXAMPLE,
        "class Compiler(Check)": EXAMPLE,
        "class Mail(Tool)": Elsewhere(
            "test_plugins.test_the_rehearsal_in_the_docs_replaces_the_tool"
        ),
        "class Rewards(L.Callback)": EXAMPLE,
        "def show(built": EXAMPLE,
        "turnrl show": Elsewhere(
            "test_plugins.test_the_command_in_the_docs_takes_a_recipe_and_its_own_options"
        ),
        "class Year(AnswerRule)": Elsewhere(
            "test_plugins.test_the_answer_rule_in_the_docs_compares_years"
        ),
        '"""A segmenter: ': SHOWN_FILE,
        '"""A player: ': SHOWN_FILE,
        '"""A turn reward: ': SHOWN_FILE,
        '"""A source: ': SHOWN_FILE,
        '"""An estimator: ': SHOWN_FILE,
        '"""An engine: ': SHOWN_FILE,
        "from turnrl.testing import": EXAMPLE,
    },
    "docs/tutorial.md": {
        "pip install . &&": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
        "mkdir island": NotRun("the commands are typed in the folder of the page"),
        "recipes copy": Runs(("turnrl fit quickstart.yaml",), ("quickstart.yaml",), alone=True),
        "fit quickstart.yaml --trainer": Runs((FINISHED,), (LAST,)),
        "iteration   1/5 ": FULL_SIZE,
        "pandas.read_csv": Runs(("val/exact_match",)),
        'load("runs/quickstart/version_0")': Runs(("What is the time zone of Utrecht?",)),
        "result: Utrecht": FULL_SIZE,
        "untrained.ask": Runs(("What is the time zone of Utrecht?",)),
        "I know this.": Printed("untrained.ask"),
        "group = turnrl.score_group": Runs(("advantages",)),
        "calls        [": Printed("group = turnrl.score_group"),
        '"""An island with': Saved("island.py"),
        '"train.jsonl": rows[:96]': Runs(("Alderby-country",), ("train.jsonl", "val.jsonl")),
        "'Alderby-country'": Printed('"train.jsonl": rows[:96]'),
        "version_0 --data.val val.jsonl": Runs(("8 questions, greedy",)),
        "32 questions, greedy": FULL_SIZE,
        '"""A tool that knows': Saved("almanac.py"),
        "from almanac import Almanac": Runs(("Elmford is a city",)),
        "no town is called 'Utrecht'": Printed("from almanac import Almanac"),
        "tools: [almanac.Almanac]": Saved("island.yaml"),
        "eval quickstart.yaml island.yaml": Runs(("8 questions, greedy",)),
        '"""A reward for answers': Saved("grounded.py"),
        "from grounded import Grounded": Runs(("right after a search",)),
        "garbage": Printed("from grounded import Grounded"),
        "class_path: grounded.Grounded": Saved("island_reward.yaml"),
        "turnrl doctor": Runs(("pass  tool search", "pass  learning")),
        "fit quickstart.yaml island.yaml island_reward.yaml": Runs((NOTHING_LEFT,)),
        "/10 ": FULL_SIZE,
        "--model.estimator OutcomeOnly": Fits(),
        "--model.group_size 8": Fits(),
        "plugin new island": Elsewhere("test_scaffold.test_a_package_has_its_own_name_everywhere"),
    },
    "docs/explanation/turns.md": {
        "segmenter: TwoTurn": Fits("model.rollout"),
        "class_path: ReAct": Fits("model.rollout"),
        "class_path: SearchR1": Fits("model.rollout"),
        "turn 3   answer": Elsewhere(
            "test_docs.test_the_worked_out_advantages_match_the_computed_ones"
        ),
        "from turnrl_estimators import PerTurnIndex": Runs(
            ("ended by   answer", "PerTurnIndex\n    +0.87  +1.44  +0.87\n    -0.87  -2.02\n"),
        ),
        "turnrl credit-check": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
    },
    # a folder called wikimedia/wikipedia stands in for the data set on the hub of that name
    "docs/howto/wikipedia-search.md": {
        "--source wikimedia/wikipedia --index indexes": Runs(("5 passages",)),
        "--split words=100": Runs(
            ("5 passages",), before=f"{BUILD} wikimedia/wikipedia:20231101.simple --index i1 "
        ),
        "index info --index": Runs(("passages  5",)),
        "When was Utrecht's": Runs(("1321",)),
        "--sample 500": Runs(('"answer@5"',)),
        "turnrl index check": Runs(("questions (", "in the index."), ("missing.jsonl",)),
        "--answers number": Elsewhere(
            "test_index_check.test_the_check_uses_the_given_split_and_answer_rule"
        ),
        "38 of 146 questions": Elsewhere(
            "test_index_check.test_the_page_shows_what_the_command_prints"
        ),
        "description: Searches the news of": Elsewhere(
            "test_wiki_search.test_the_documented_pair_of_searches_makes_two_tools_in_one_recipe"
        ),
        "index: indexes/wikipedia": Fits("model.rollout"),
        "backend: retrieve": Elsewhere(
            "test_outage_retrieve.test_five_lines_of_a_recipe_train_with_the_server_of_the_page"
        ),
        "POST {": Elsewhere(
            "test_retrieve.test_the_documented_request_and_answer_match_the_protocol"
        ),
        "fields: {text: body, title: headline}": Elsewhere(
            "test_ranking.test_a_few_lines_of_a_recipe_of_the_page_train"
        ),
        "--index news --fields": Elsewhere(
            "test_ranking.test_the_answers_in_somebody_elses_index_are_counted"
        ),
        "pip install 'turnrl[encoders]'": NotRun("the package index, and a model of the hub"),
        "--passage-prefix": Elsewhere(
            "test_ranking.test_a_passage_prefix_is_encoded_and_part_of_the_version"
        ),
        "--encoder sentence-transformers/all-MiniLM-L6-v2": Elsewhere(
            "test_ranking.test_the_command_builds_describes_and_searches_by_vectors"
        ),
        "encoder: sentence-transformers/all-MiniLM-L6-v2": Elsewhere(
            "test_ranking.test_a_few_lines_of_a_recipe_of_the_page_train"
        ),
        "image: docker": Elsewhere("test_wiki_search.test_the_recipes_in_the_docs_make_tools"),
        "docker compose": NotRun("needs docker; the tests start the server without a container"),
        "export TURNRL_ES_URL": Runs(server=True),
        "--backend elasticsearch --source": Runs(("5 passages",), server=True),
        "index info --backend": Runs(("passages  5",), server=True),
        "--analyzer standard": Runs(
            ("5 passages",),
            server=True,
            slow=True,
            before=f"{BUILD} wikimedia/wikipedia --backend elasticsearch --index wikipedia "
            "--overwrite --shards 2 --k1 0.9 --b 0.4 ",
        ),
        "backend: elasticsearch": Fits("model.rollout"),
        "build_from: HotpotParagraphs": Elsewhere(
            "test_hotpotqa.test_the_recipes_on_the_page_train_over_paragraphs"
        ),
        "init_args: {limit: 2000}": Elsewhere(
            "test_hotpotqa.test_the_recipes_on_the_page_train_over_paragraphs"
        ),
        '"question": "In which country': Elsewhere(
            "test_hotpotqa.test_the_row_that_the_page_shows_is_read"
        ),
    },
    "recipes/README.md": {
        "--card 24GB": Elsewhere("test_doctor.test_a_card_prints_its_plan"),
        "turnrl fit NAME": NotRun("a placeholder"),
        "turnrl fit quickstart": Elsewhere(NAMED),
        "turnrl recipes": Elsewhere(LISTED),
        "turnrl recipes copy": Elsewhere(COPIED),
        "recipes/variants": Elsewhere("test_cli.test_every_variant_overrides_its_recipe"),
        "OutcomeOnly": Runs((FINISHED,), ("runs/grpo_or/version_0/metrics.csv",), slow=True),
        "Merged": Runs((FINISHED,), ("runs/grpo_mr/version_0/metrics.csv",), slow=True),
        "--data.val_split test": Fits(),
        "--data.val Atlas": Fits(),
        "--data.questions_per_iteration 16": Fits(),
    },
    "plugins/turnrl-atlas/README.md": {
        "train: Atlas": Fits(),
        "atlas_starter.yaml": Runs(
            ("`Trainer.fit` stopped: `max_",),
            ("plugins/turnrl-atlas/turnrl_atlas/starter/config.json",),
            slow=True,
        ),
        "turnrl_atlas.figures": Elsewhere(
            "test_atlas.test_the_readme_states_the_figures_that_the_command_prints"
        ),
    },
    "plugins/turnrl-bench/README.md": {
        "turnrl bench": Elsewhere("test_bench.test_the_command_has_help_pages"),
        "compare.py": COMPARED,
        "import Forced": Elsewhere("test_bench.test_the_example_in_the_readme_forces_tokens"),
    },
    "plugins/turnrl-doctor/README.md": {"turnrl doctor": Runs(("pass  learning",))},
    "plugins/turnrl-estimators/README.md": {
        "class_path: GroupInGroup": Fits("model"),
        "estimator: CostsAmongRight": Fits("model"),
        "import applied": Elsewhere(
            "test_applied.test_the_example_in_the_readme_names_every_estimator"
        ),
        "turnrl credit-check": Elsewhere("test_docs.test_a_command_does_what_its_page_says"),
    },
    "plugins/turnrl-openai/README.md": {
        "from turnrl_openai import": Elsewhere(
            "test_endpoint.test_the_example_on_the_page_scores_a_vendors_model"
        ),
    },
    "plugins/turnrl-rewards/README.md": {
        "rewards:": Fits("model"),
        "class_path: SupportSeen": Fits("model"),
        "class PassagesSeen": Elsewhere("test_turn_rewards.test_the_score_in_the_readme_works"),
        "measure: probability": Fits("model"),
        "class_path: LLMJudge": Fits("model"),
        "answers: {class_path: Number": Fits(),
        "from turnrl_rewards import Number": Runs(("True",)),
    },
    "plugins/turnrl-segmenters/README.md": {
        "segmenter: TwoTurn": Fits("model.rollout"),
        "class_path: ReAct": Fits("model.rollout"),
    },
    "plugins/turnrl-slots/README.md": {"class_path: Slots": Fits("model")},
    "plugins/turnrl-sglang/README.md": {
        "class_path: SGLang": Fits(),
    },
    "plugins/turnrl-vllm/README.md": {
        "class_path: VLLM": Fits(),
    },
    "plugins/turnrl-wiki-search/README.md": {
        "index build": Runs(("300 passages",)),
        "index info": Runs(("passages  300",)),
        "index search": Runs(("begun in 1321",)),
        "index check": Runs(("have an accepted answer in the index.",)),
        "index: indexes/corpus": Fits("model.rollout"),
        "tools.help WikiSearch": Runs(("--model.rollout.tools.top_k",), slow=True),
    },
}

SMALL = {
    "model": {"group_size": 4, "steps_per_pass": 1},
    "data": {"questions_per_iteration": 2, "val_limit": 8, "val_batch_size": 8},
    # with a step per iteration, and at most 4 of them whatever number of epochs is asked for
    "trainer": {"max_epochs": 2, "max_steps": 4, "check_val_every_n_epoch": 1},
}
SMALL_PHASE = {"steps": 2, "batch_size": 4}


def claim_of(piece: Piece) -> Claim | None:
    claims = CLAIMS.get(piece.page, {})
    snippet = snippet_of(piece, list(claims))
    return None if snippet is None else claims[snippet]


def claimed(*kinds: type[Claim]) -> list[tuple[Piece, Claim]]:
    """What is claimed in such a way, of all pages."""
    everything = [(piece, claim_of(piece)) for page in PAGES for piece in pieces(page)]
    return [(piece, claim) for piece, claim in everything if isinstance(claim, kinds)]


def each(*kinds: type[Claim]) -> list[object]:
    """The same, for a test of each."""
    params = []
    for piece, claim in claimed(*kinds):
        marks = []
        if isinstance(claim, Runs | Printed) and claim.slow:
            marks.append(pytest.mark.slow)
        if isinstance(claim, Runs) and claim.server:
            marks.append(pytest.mark.elasticsearch)
        params.append(pytest.param(piece, claim, id=str(piece), marks=marks))
    return params


# ------------------------------------------------------------------ every page, all of it


def needs_no_claim(piece: Piece) -> bool:
    """The name of a command or an option in a sentence, of which the help pages know."""
    name = r"turnrl( [a-z]+)+( --source)?" if piece.kind == "mention" else r"--[\w.]+"
    return piece.kind in ("mention", "option") and re.fullmatch(name, piece.text) is not None


@pytest.mark.parametrize("page", PAGES)
def test_everything_that_a_page_shows_is_claimed_and_every_claim_is_about_something(page):
    shown = pieces(page)
    unclaimed = [p for p in shown if claim_of(p) is None and not needs_no_claim(p)]
    assert unclaimed == [], "say in CLAIMS how it is tested"
    claims = CLAIMS.get(page, {})
    about = {snippet_of(piece, list(claims)) for piece in shown}
    assert set(claims) - about == set(), "nothing on the page says so any more"


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_a_paragraph_is_read_as_a_list(page):
    lines = (ROOT / page).read_text().splitlines()
    assert read_as_lists(lines) == []


def read_as_lists(lines: list[str]) -> list[str]:
    """Lines that begin a list in Markdown without an empty line before: `1)` or `-`, where a line
    of a sentence happened to break."""
    tokens = MarkdownIt().parse("\n".join(lines))
    outer = [token for token in tokens if token.map and token.level == 0]
    ends = {token.map[1] for token in outer if token.type == "paragraph_open"}
    begins = (token.map[0] for token in outer if token.type.endswith("list_open"))
    return [lines[number] for number in begins if number in ends]


def test_a_line_that_breaks_before_a_number_is_read_as_a_list():
    assert read_as_lists(["the average (0 to", "1) over the tokens."]) == ["1) over the tokens."]
    assert read_as_lists(["some", "", "1. first", "2. second", "", "more"]) == []


def test_the_tests_that_claims_name_are_there():
    for piece, claim in claimed(Elsewhere):
        module, _, name = claim.by.partition(".")
        assert f"def {name}" in (ROOT / "tests" / f"{module}.py").read_text(), piece


def help_of(*command: str, capsys) -> str:
    try:
        code = main([*command, "--help"])
    except SystemExit as ended:
        code = ended.code
    assert code == 0, command
    return capsys.readouterr().out


def test_commands_and_options_in_sentences_appear_in_the_help_pages(capsys):
    unclaimed = [p for page in PAGES for p in pieces(page) if claim_of(p) is None]
    named = {p.text.split(" --")[0] for p in unclaimed if p.kind == "mention"}
    assert named >= {"turnrl fit", "turnrl eval", "turnrl plugin new", "turnrl index build"}
    pages = {command: help_of(*command.split()[1:], capsys=capsys) for command in named}
    help_pages = "".join(pages.values())
    options = {p.text for p in unclaimed if p.kind == "option"}
    assert {
        option for option in options if not re.search(rf"{option}(?![\w.])", help_pages)
    } == set()


# ------------------------------------------------------------------ typed in a terminal


def merged(base: dict, more: dict) -> dict:
    base = copy.deepcopy(base)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(base.get(key), dict)
        base[key] = merged(base[key], value) if both else value
    return base


def put_recipes(folder: Path, **more: object) -> None:
    """`recipes/` as in a clone, with small settings where something is trained."""
    shutil.copytree(ROOT / "recipes", folder / "recipes", dirs_exist_ok=True)
    quickstart = folder / "recipes" / "quickstart.yaml"
    recipe = merged(merged(yaml.safe_load(quickstart.read_text()), SMALL), more)
    quickstart.write_text(yaml.safe_dump(recipe))
    starter = folder / "recipes" / "atlas_starter.yaml"
    recipe = yaml.safe_load(starter.read_text())
    for phase in recipe["data"]["init_args"]["phases"]:
        phase |= SMALL_PHASE
    starter.write_text(yaml.safe_dump(recipe))


def lines(rows: list[dict], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def put_data(folder: Path) -> None:
    """The files that pages speak of as the reader's own, and a data set in place of the hub's."""
    questions = [
        {"id": q.id, "question": q.text, "answers": list(q.answers)}
        for q in islice(Atlas().questions("train"), 500)
    ]
    lines(questions, folder / "questions.jsonl")
    lines(questions[:16], folder / "held_out.jsonl")
    tower = "The Dom Tower of Utrecht was begun in 1321. It stands in the middle of the city. "
    passages = [{"id": "tower", "title": "Dom Tower", "text": tower}] + [
        {"id": p.id, "title": p.title, "text": p.text} for p in islice(Atlas().passages(), 299)
    ]
    lines(passages, folder / "corpus.jsonl")
    (folder / "mine.yaml").write_text("model: {optimizer: {init_args: {lr: 1.0e-4}}}\n")
    articles = [
        {"id": "1", "title": "Dom Tower", "text": tower * 20},
        {"id": "2", "title": "Paris", "text": "Paris is the capital of France."},
    ]
    hub = folder / "wikimedia" / "wikipedia"
    lines(articles, hub / "articles.jsonl")
    configs = [{"config_name": f"20231101.{c}", "data_files": "*.jsonl"} for c in ("en", "simple")]
    (hub / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': configs})}---\n")


def put_gsm8k(folder: Path) -> dict[str, str]:
    """The files of the page about GSM8K, with a few rows in its format; the page's blocks."""
    words = {"json": "Tom has 6", "python": "class Calculator", "yaml": "arithmetic.Calculator"}
    blocks = {
        kind: next(
            p.text for p in pieces("docs/howto/gsm8k.md") if p.kind == kind and word in p.text
        )
        for kind, word in words.items()
    }
    rows = [json.loads(blocks["json"])]
    for a, b in [(2, 3), (40, 25), (7, 9)]:
        solution = f"There are {a} * {b} = <<{a}*{b}={a * b}>>{a * b} of them.\n#### {a * b:,}"
        rows.append({"question": f"How many are {a} times {b} hens?", "answer": solution})
    lines(rows, folder / "train.jsonl")
    lines(rows, folder / "test.jsonl")
    (folder / "arithmetic.py").write_text(blocks["python"])
    (folder / "gsm8k.yaml").write_text(blocks["yaml"])
    return blocks


ON_QUICKSTART = ("calculator", "functions", "coming-from")
"""Pages whose recipes override the quickstart by its name."""

MY_TOOL = '''
import turnrl

class MyTool(turnrl.Tool):
    """One that is not packaged."""

    name, description, parameters = "mine", "Does nothing.", {"type": "object"}

    def run(self, calls):
        return [turnrl.ToolResult("nothing") for _ in calls]
'''


class Page:
    """A page that is followed in a folder, from its first line to its last."""

    def __init__(self, name: str, folder: Path, nursery: Nursery | None) -> None:
        self.name, self.folder = name, folder
        self._nursery = nursery
        self.terminal = Terminal(folder, nursery)
        self.leaving = False
        self._done: dict[Piece, Future[Done]] = {
            piece: Future()
            for piece, claim in claimed(Runs)
            if piece.page == name and claim.at_once
        }

    def follow(self) -> None:
        """Run what the page shows."""
        try:
            self.prepare()
            for piece, future in self._done.items():
                if not self.leaving:
                    future.set_result(self.run(piece))
        except BaseException as error:
            for future in self._done.values():
                if not future.done():
                    future.set_exception(error)

    def prepare(self) -> None:
        """What the page takes for granted."""
        put_recipes(self.folder)
        put_data(self.folder)
        if self.name in ("README.md", "docs/howto/index.md"):  # what README's first line does
            # as a new user types it, once
            begun = Terminal(self.folder, None) if self.name == "README.md" else self.terminal
            self.check(begun.type("turnrl fit recipes/quickstart.yaml"), Runs((FINISHED,)))
        for piece, claim in claimed(Saved):
            if piece.page == self.name:
                (self.folder / claim.name).write_text(piece.text)
        if self.name in ("docs/tutorial.md", *(f"docs/howto/{n}.md" for n in ON_QUICKSTART)):
            shutil.copy(self.folder / "recipes" / "quickstart.yaml", self.folder)
        if self.name == "docs/howto/gsm8k.md":
            put_gsm8k(self.folder)
        if self.name == "docs/howto/runs.md":
            put_recipes(
                self.folder,
                trainer={"max_epochs": 50},
                model={"optimizer": {"init_args": {"lr": 0.001}}},
            )
            done = self.terminal.type(
                "turnrl fit recipes/quickstart.yaml --trainer.max_steps 100", "iteration   1/50"
            )
            assert done.code == 130, done.text
            assert f"--ckpt_path {LAST}" in done.text

    def run(self, piece: Piece) -> Done:
        claim = claim_of(piece)
        if isinstance(claim, Printed):
            typed = [done for piece, done in self._done.items() if claim.by in piece.text]
            return typed[0].result() if typed else self.terminal.type(claim.by)
        assert isinstance(claim, Runs)
        command = piece.text
        if piece.kind == "python":
            (self.folder / "block.py").write_text(piece.text)
            command = "python block.py"
        if piece.kind == "yaml":
            (self.folder / "block.yaml").write_text(piece.text)
            command = "turnrl fit recipes/quickstart.yaml block.yaml --print_config"
        terminal = self.terminal
        if claim.alone:
            folder = self.folder / "alone"
            folder.mkdir()
            put_recipes(folder)
            terminal = Terminal(folder, self._nursery)
        return terminal.type(f"{claim.before}{command.strip()}{claim.after}", timeout_s=1500)

    def result(self, piece: Piece) -> Done:
        """How a command ended; those that are not run with the page come after it."""
        for future in [self._done[piece]] if piece in self._done else self._done.values():
            future.result()
        return self._done[piece].result() if piece in self._done else self.run(piece)

    def check(self, done: Done, claim: Runs) -> None:
        assert done.code == 0, done.text
        assert "Traceback (most recent call last)" not in done.text
        assert "Warning" not in done.text
        shown = f"{done.text}\n{' '.join(done.text.split())}"  # and without the terminal's wrapping
        assert [text for text in claim.says if text not in shown] == [], done.text
        folder = self.folder / "alone" if claim.alone else self.folder
        assert [path for path in claim.leaves if not list(folder.glob(path))] == []
        # a line that is drawn again and again, or that is turnrl's own, fits the terminal
        own = [line for line in done.lines if re.match("before|iteration|validation", line)]
        drawn = [part for line in done.plain.split("\n") for part in line.split("\r")[1:]]
        assert [line for line in [*own, *drawn] if len(line) > 80] == []


@pytest.fixture(scope="module")
def following(request, tmp_path_factory, nursery) -> Iterator[dict[str, Page]]:
    """The pages that are asked about, followed two at a time."""
    params = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {p["piece"].page for p in params if "piece" in p}
    folders = {name: tmp_path_factory.mktemp("page") for name in PAGES if name in asked}
    pages = {name: Page(name, folder, nursery) for name, folder in folders.items()}
    if any("elasticsearch" in item.keywords for item in request.session.items):
        with contextlib.suppress(pytest.skip.Exception):  # which `server` will say again
            request.getfixturevalue("open_node")  # it starts in the background
    with ThreadPoolExecutor(2) as pool:
        for page in pages.values():
            pool.submit(page.follow)
        yield pages
        for page in pages.values():
            page.leaving = True


@pytest.fixture(scope="module")
def clone(tmp_path_factory) -> Page:
    """A copy of the repository with a small recipe, and none of what is installed here."""
    folder = tmp_path_factory.mktemp("clone") / "turnrl"
    unwanted = (".git", ".venv", "runs", "indexes", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*unwanted))
    page = Page("README.md", folder, None)
    page.terminal.environment.pop("PYTHONPATH", None)
    put_recipes(folder)
    return page


@pytest.fixture(scope="module")
def server(request) -> Iterator[str]:
    """The address of a search server that has no index 'wikipedia', and has none afterwards."""
    own = os.environ.get("TURNRL_TEST_ES_URL")
    address = own or request.getfixturevalue("open_node").url

    def ask(method: str) -> None:
        request = urllib.request.Request(f"{address}/wikipedia", method=method)
        urllib.request.urlopen(request).close()

    try:
        ask("HEAD")
    except urllib.error.HTTPError as error:
        error.close()
        if error.code != 404:
            raise
    else:
        pytest.skip(f"{address} has an index 'wikipedia' already")
    yield address
    ask("DELETE")


@pytest.mark.parametrize(("piece", "claim"), each(Runs))
def test_a_command_does_what_its_page_says(piece, claim, request):
    if claim.clone:
        page = request.getfixturevalue("clone")
        done = page.run(piece)
    else:
        page = request.getfixturevalue("following")[piece.page]
        if claim.server:
            address = request.getfixturevalue("server")
            page.terminal.environment["TURNRL_ES_URL"] = address
            text = piece.text.replace("http://localhost:9200", address)
            piece = Piece(piece.page, piece.kind, text)
        done = page.result(piece)
    page.check(done, claim)


NOTEBOOKS = [param for param in each(Runs) if param.values[1].notebook]


@pytest.mark.slow
@pytest.mark.parametrize(("piece", "claim"), NOTEBOOKS)
def test_a_block_for_a_notebook_runs_in_one(piece, claim, following):
    page = following[piece.page]
    page.result(piece)
    cell = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    book = {"nbformat": 4, "nbformat_minor": 4, "metadata": {}, "cells": [cell]}
    path = page.folder / "block.ipynb"
    path.write_text(json.dumps(merged(book, {"cells": [{**cell, "source": piece.text}]})))
    done = page.terminal.type(f"jupyter execute --inplace {path.name}")
    assert done.code == 0, done.text
    (cell,) = json.loads(path.read_text())["cells"]
    shown = "".join("".join(output.get("text", ())) for output in cell["outputs"])
    assert [text for text in claim.says if text not in shown] == []


@pytest.mark.parametrize(("piece", "claim"), each(Printed))
def test_lines_shown_on_a_page_are_printed(piece, claim, following):
    done = following[piece.page].result(piece)
    assert done.code == 0, done.text
    assert piece.text.strip() in done.text


def without_figures(text: str) -> set[str]:
    """The lines of a text, with times as dots and numbers as zeros: other machines have others."""
    times = re.sub(r"\d+:\d\d(\s+(\d+[hms]\s*)+)?", "... ", text)
    figures = re.sub(r"\d[\d.]*", "0", times)
    return {" ".join(line.split()) for line in figures.splitlines()}


def follow_at_full_size(page: str, folder: Path, nursery: Nursery) -> int:
    """Type what a page shows, as it stands there, and compare all that it says is printed: so many
    blocks."""
    terminal, shown, compared = Terminal(folder, nursery), "", 0
    for piece in pieces(page):
        claim = claim_of(piece)
        if isinstance(claim, Saved):
            (folder / claim.name).write_text(piece.text)
        elif isinstance(claim, Runs):
            if piece.kind == "python":
                (folder / "block.py").write_text(piece.text)
            command = "python block.py" if piece.kind == "python" else piece.text.strip()
            done = terminal.type(command, timeout_s=1500)
            assert done.code == 0, done.text
            shown = done.text
        elif piece.kind == "text":
            assert without_figures(piece.text) - without_figures(shown) == set(), shown
            compared += 1
    return compared


@pytest.mark.slow
def test_the_full_size_tutorial_prints_the_output_it_shows(tmp_path, nursery):
    assert follow_at_full_size("docs/tutorial.md", tmp_path, nursery) > 8


@pytest.mark.slow
def test_the_policy_learns_the_calculator_as_the_page_shows(tmp_path, nursery):
    assert follow_at_full_size("docs/howto/calculator.md", tmp_path, nursery) == 3
    with (tmp_path / "runs/calculator/version_0/metrics.csv").open() as file:
        curve = [float(x) for row in csv.DictReader(file) if (x := row["val/exact_match"])]
    assert curve[0] < 0.2
    assert curve[-1] >= 0.6


@pytest.mark.parametrize(("piece", "claim"), each(Lists))
def test_the_files_that_a_page_lists_are_there(piece, claim, following):
    page = following[piece.page]
    for before in page._done:
        page.result(before)
    folder = page.folder / claim.folder
    for line in piece.text.splitlines():
        name = line.split()[0]
        assert (folder / name).exists(), name
        for file in re.findall(r"\b\w+\.py\b", line.partition(name)[2]):
            assert (folder / name).with_name(file).is_file(), file


# ------------------------------------------------------------------ in a recipe


def put_plugin(folder: Path, name: str) -> str:
    """Make the template of `turnrl plugin new` an installed package, for processes that have this
    `PYTHONPATH`."""
    templates = ROOT / "turnrl/commands/scaffold/templates"
    info = folder / f"{name}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[turnrl]\nexample = {name}\n")
    return os.pathsep.join([str(templates / name.replace("_", "-")), str(folder)])


def scalars(value: object) -> Iterator[object]:
    """The words and numbers of YAML, but for its keys."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(parts, str | int | float | None):
        yield value
    else:
        for part in parts:
            yield from scalars(part)


def plain(value: object) -> object:
    """A number as a number, and of the path of a class its name."""
    try:
        return float(str(value))
    except ValueError:
        return str(value).rpartition(".")[2]


@pytest.mark.parametrize(("piece", "claim"), each(Fits))
def test_settings_that_a_page_shows_are_accepted(
    piece, claim, tmp_path, monkeypatch, capsys, nursery
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    agent = (ROOT / "tests" / "players" / "plain_agent" / "__init__.py").read_text()
    (tmp_path / "my_module.py").write_text(f"{agent}{MY_TOOL}\nfrom worlds import Echo\n")
    put_recipes(tmp_path)
    put_data(tmp_path)
    options: list[str] = []
    if piece.kind == "option":
        options = shlex.split(piece.text)
        wanted = [yaml.safe_load(value) for value in options[1::2]]
    else:
        block = yaml.safe_load(piece.text)
        wanted = [block]
        for section in reversed(claim.under.split(".") if claim.under else []):
            block = {section: block}
        recipe = Path("recipes", "quickstart.yaml")
        recipe.write_text(yaml.safe_dump(merged(yaml.safe_load(recipe.read_text()), block)))
    asked = ["fit", "recipes/quickstart.yaml", *options, "--print_config"]
    if claim.plugin:  # in a process of its own: classes that were once there are listed for ever
        path = {"PYTHONPATH": put_plugin(tmp_path, claim.plugin)}
        environment = {**os.environ, **nursery.environment, **path}
        program = command(*asked)
        ran = subprocess.run(
            program, env=environment, stdout=subprocess.PIPE, text=True, check=True
        )
        printed = ran.stdout
    else:
        assert main(asked) == 0
        printed = capsys.readouterr().out
    resolved = [plain(value) for value in scalars(yaml.safe_load(printed))]
    assert [value for value in scalars(wanted) if plain(value) not in resolved] == []


# ------------------------------------------------------------------ single promises


@pytest.mark.filterwarnings("default")  # a script of one's own shows Lightning's warnings
def test_the_script_that_trains_by_hand_runs(tmp_path, monkeypatch):
    script = (ROOT / "docs" / "by_hand.py").read_text()
    assert len(script.splitlines()) <= 34
    # as it stands but for its size, which is that of a demonstration
    small = script.replace("questions_per_iteration=8, val_limit=64", SMALLER)
    assert SMALLER in small
    monkeypatch.chdir(tmp_path)
    exec(compile(small, "docs/by_hand.py", "exec"), {"__name__": "__main__"})
    (metrics,) = tmp_path.rglob("metrics.csv")
    header, *rows = metrics.read_text().splitlines()
    assert "val/exact_match" in header
    assert "train/tool_execution" in header
    assert len(rows) == 3  # untrained, and after each of two iterations


SMALLER = "questions_per_iteration=2, val_limit=8"


def test_the_calculator_and_the_rows_of_the_page_fit_together(tmp_path):
    blocks = put_gsm8k(tmp_path)
    space = {"__name__": "arithmetic"}
    exec(compile(blocks["python"], "arithmetic.py", "exec"), space)
    tool, reward = space["Calculator"](), space["NumberGiven"]()
    wrong = ["1 +", "'a' * 3", "2 ** 9", "1 / 0", "x", "", "(" * 100, "-" * 99, "\0"]
    calls = [{"expression": text} for text in ("(3 + 4) * 6", "-1/4", " 1e300 * 1e300")]
    check_tool(tool, calls, [{"expression": text} for text in wrong])
    results = tool.run([ToolCall("calculate", call) for call in calls])
    assert [result.content for result in results] == ["42", "-0.25", "inf"]
    settings = yaml.safe_load(blocks["yaml"])["data"]
    questions = load_questions(str(tmp_path / "train.jsonl"), fields=Fields(**settings["fields"]))
    assert [q.answers for q in questions] == [("42",), ("6",), ("1,000",), ("63",)]

    turns = [Turn("", Reading(answer=a)) for a in ("1,000", "-4.5", "42 pens", None)]
    tried = [Trajectory(questions[0], (turn,), "answer") for turn in turns]
    assert [reward.score(trajectory) for trajectory in tried] == [0.1, 0.1, 0, 0]
    space.clear()  # a message of another test lists the tools that there are
    del tool, reward
    gc.collect()


@pytest.fixture
def calculator() -> Iterator[dict[str, Any]]:
    """What the page about a calculator puts into `calculator.py`, by name."""
    (file,) = (p.text for p in pieces("docs/howto/calculator.md") if "class Sums" in p.text)
    space: dict[str, Any] = {"__name__": "calculator"}
    exec(compile(file, "calculator.py", "exec"), space)
    yield space
    space.clear()  # a message of another test lists the tools that there are
    gc.collect()


def test_the_held_out_questions_for_the_calculator_have_numbers_that_training_never_has(calculator):
    asked = {split: calculator["Sums"]().questions(split) for split in ("train", "val")}
    assert [len(questions) // 500 for questions in asked.values()] == [7, 1]
    sets = [
        {tuple(sorted(re.findall(r"\d+", question.text))) for question in questions}
        for questions in asked.values()
    ]
    assert sets[0] & sets[1] == set()
    for question in (*asked["train"], *asked["val"]):
        sum_ = re.fullmatch(
            r"What is ([0-9]+(?: (?:plus|minus|times) [0-9]+){1,2})\?", question.text
        )
        signs = {"plus": "+", "minus": "-", "times": "*"}
        computed = eval(" ".join(signs.get(word, word) for word in sum_[1].split()))
        assert question.answers == (str(computed),)


def test_the_example_calculator_refuses_invalid_expressions_without_raising(calculator):
    right = {
        "52 minus 62 minus 76": "-86",
        "2 plus 3 times 4 minus 5": "9",
        "3 times 4 minus 2 times 5": "2",
        "-7+ 6*2": "5",
        " 2  times 99 ": "198",
    }
    wrong = (
        "|62 minus|minus|5|1 2 plus 3|1 / 0|2 ** 9|2 * -3|(1 + 2)|1e3 + 2|1.5 + 2|\u00b2 + 1|x|\0"
    )
    wrong = [*wrong.split("|"), "9" * 10 + " + 1", "(" * 100, "__import__('os').getcwd()"]
    calls = [{"expression": text} for text in (*right, *wrong)]
    tool = calculator["Calculator"]()
    check_tool(tool, calls[: len(right)], calls[len(right) :])
    results = tool.run([ToolCall("calculator", call) for call in calls])
    assert [result.content for result in results if result.ok] == [*right.values()]
    assert [result.ok for result in results] == [True] * len(right) + [False] * len(wrong)


def test_readme_has_one_line_to_train_and_one_to_test():
    readme = (ROOT / "README.md").read_text()
    for name, word in [("quickstart", "fit recipes/quickstart.yaml"), ("test", "pytest")]:
        block = re.search(rf"<!-- {name} line -->\n```bash\n(.*?)\n```", readme, re.DOTALL)
        assert block, name
        assert "\n" not in block.group(1)
        assert word in block.group(1)


# of the page on turns: four attempts; the first and the third find the answer in turn 2
REACHED = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1], [1, 0, 0]]).bool()
FOUND = torch.tensor([[0, 0.5, 0], [0, 0, 0], [0, 0.5, 0], [0, 0, 0]])
RIGHT = torch.tensor([1.0, 0.0, 0.0, 1.0])
THIRD_FIRST = [2, 0, 1, 3]


WORKED_OUT = "docs/explanation/turns.md"


def advantages_that_are_worked_out():
    """(turns, 2): those of `TurnLevel`, and one for all."""
    (block,) = (p.text for p in pieces(WORKED_OUT) if "turn 3   answer" in p.text)
    lines = block.splitlines()[2:]
    return [[float(x) for x in re.findall(r"[+-]\d\.\d\d", line)] for line in lines]


def how_they_come_about() -> str:
    """The paragraph below them, as one line."""
    text = (ROOT / WORKED_OUT).read_text()
    (paragraph,) = re.findall(r"^Each advantage is .*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    return " ".join(paragraph.split())


def test_the_worked_out_advantages_match_the_computed_ones():
    rules = TurnLevel(), OutcomeOnly()
    third = torch.stack([rule.advantages(FOUND, RIGHT, REACHED)[2] for rule in rules], dim=1)
    assert torch.allclose(torch.tensor(advantages_that_are_worked_out()), third, atol=0.005)


def test_the_advantages_that_are_worked_out_are_in_the_table_above_them():
    page = (ROOT / "docs" / "explanation" / "turns.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| ([+-]\d.*) \|$", page, re.MULTILINE))
    third = [rows[rule].split(" | ")[2].split() for rule in ("TurnLevel", "OutcomeOnly")]
    turns = zip(*third, strict=True)
    assert [[float(x) for x in turn] for turn in turns] == advantages_that_are_worked_out()


def test_the_parts_of_each_advantage_are_computed_as_the_page_says():
    text = how_they_come_about()
    lists = re.findall(r"[\d.]+(?:, [\d.]+)* and [\d.]+", text)
    compared = [[float(x) for x in re.split(", | and ", values)] for values in lists]
    returns = FOUND.flip(1).cumsum(1).flip(1)  # of a turn's own reward and the later ones
    outcomes, *turns = (
        column[THIRD_FIRST][took[THIRD_FIRST]].tolist()
        for column, took in zip(
            (RIGHT, *returns.T), (torch.ones(4).bool(), *REACHED.T), strict=True
        )
    )
    assert compared == [outcomes, turns[0], turns[1]]
    assert turns[2] == [0, 0]  # from turn 3 on none earned any
    sums = re.findall(r"\((\S+) - (\S+)\) / (\S+) = ([+-]\d\.\d\d)", text)
    for (value, mean, deviation, part), values in zip(sums, compared, strict=True):
        assert float(value) == values[0]
        assert float(mean) == pytest.approx(statistics.mean(values), abs=5e-4)
        assert float(deviation) == pytest.approx(statistics.stdev(values), abs=5e-4)
        assert part == f"{(float(value) - float(mean)) / float(deviation):+.2f}"
    outcome, *own = (float(part) for *_, part in sums)
    shown = [advantage for advantage, _ in advantages_that_are_worked_out()]
    assert shown == pytest.approx([outcome + part for part in (*own, 0)], abs=1e-9)


def test_a_tool_that_a_cell_writes_is_named_by_a_recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (block,) = (p.text for p in pieces("docs/howto/notebook.md") if "%%writefile" in p.text)
    magic, text = block.split("\n", 1)
    Path(magic.removeprefix("%%writefile ")).write_text(text)
    run = build(["quickstart", "--model.rollout.tools", "[almanac.population]"])
    (spec,) = run.module.rollout.specs
    assert (spec.name, spec.description) == ("population", "How many people live in a city.")


def test_the_picture_of_readme_is_of_the_recorded_attempt():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")
        attempt = importlib.import_module("attempt")
    record = json.loads((attempt.HERE / "attempt.json").read_text())
    own = attempt.advantages(record)
    assert own["MT-GRPO"] == pytest.approx(record["recorded"], abs=1e-5)
    outcomes = [row["outcome"] for row in record["attempts"]]
    sums = [row["outcome"] + sum(row["turn_rewards"]) for row in record["attempts"]]
    for name, values in (("GRPO-OR", outcomes), ("GRPO-MR", sums)):
        z = (values[record["member"]] - statistics.mean(values)) / statistics.stdev(values)
        assert own[name] == pytest.approx([z] * 3, abs=1e-4)
    for theme in attempt.THEMES:
        drawn = (attempt.HERE / f"attempt-{theme}.svg").read_text()
        assert drawn == attempt.picture(record, theme)


def test_everything_shown_on_the_sites_first_page_is_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    shown = [piece.text.strip() for piece in pieces("docs/index.md")]
    assert shown
    assert [text for text in shown if text not in readme] == []


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_of_a_page_lead_somewhere(page):
    file = ROOT / page
    text = re.sub(r"^```.*?^```", "", file.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target:
            assert (file.parent / target).exists(), target
    for recipe in re.findall(r"recipes/[a-z][\w.]+\.yaml", file.read_text()):
        assert (ROOT / recipe).is_file(), recipe


def test_every_recipe_stands_in_the_table():
    table = (ROOT / "recipes" / "README.md").read_text()
    for recipe in (ROOT / "recipes").rglob("*.yaml"):
        assert f"[{recipe.name}]({recipe.relative_to(ROOT / 'recipes')})" in table
