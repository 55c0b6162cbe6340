"""What the pages of the documentation claim: how each command and block is tested, or why not.

`CLAIMS` holds the claims, by page; `test_docs` tests them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Runs:
    """A command, Python block or recipe that the test runs: Python in an interpreter of its own,
    YAML as a second recipe, whose settings are printed (`Fits` does the same more quickly, but
    imports here what it names). It ends with 0, without a traceback and without warnings.

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
COMPARED = Elsewhere("test_bench.test_each_command_on_the_page_exists_in_its_script")
REHEARSED = Elsewhere("test_bench.test_the_steps_for_a_new_card_are_rehearsed_on_a_cpu")
OFFLINE = NotRun("the package index, and a machine without a network")
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
        "turnrl --help": Runs(("warmup", "export")),
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
        "pip install 'turnrl[gpu]'": NotRun("what an earlier version said"),
        "pip install turnrl": NotRun("what no message says any more"),
        "--model.optimizer.lr 1e-5": Fits(),
        "--model.estimator.gamma 0.9": Fits(),
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
            "test_layers.test_the_list_of_rooms_names_exactly_the_modules_and_folders"
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
        "--trust": Elsewhere(
            "test_strangers.test_a_strangers_checkpoint_runs_nothing_without_consent"
        ),
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
        "from turnrl import export": Runs((), ("last/README.md", "last/model.safetensors")),
        "from turnrl import ChatFormat": Runs(("[1, ",)),
        "pandas.read_csv": Runs(("iteration",)),
        "record.transcript(": Runs(("question   ", " questions")),
        "record.table(": Runs(("exact_match_mean", "train-00000")),
    },
    "docs/howto/sweep.md": {
        "--seeds 0..1 --set": Runs(
            ("4 runs (2 settings x 2 seeds)", "Student's t over seeds"),
            ("runs/quickstart-sweep/results.jsonl", "runs/quickstart-sweep/table.txt"),
            slow=True,
        ),
        "A  model.estimator": NotRun("six runs of 10 iterations, each some minutes"),
        "--seeds 0": Elsewhere("test_sweep.test_seeds_and_values_are_parsed"),
        "--set model.group_size": Elsewhere("test_sweep.test_seeds_and_values_are_parsed"),
        "--set config": Elsewhere("test_sweep.test_a_setting_may_be_a_recipe"),
        "--jobs 2": Elsewhere("test_sweep.test_cores_are_divided_and_every_run_has_its_gpu"),
        "--results": Elsewhere("test_sweep.test_results_can_be_kept_in_a_file_apart_from_the_runs"),
        "turnrl sweep --json": Elsewhere("test_sweep.test_the_table_can_be_json"),
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
        "endpoint:": Elsewhere("test_eval.test_the_servers_can_be_in_their_own_recipe"),
        "turnrl eval recipes/quickstart.yaml vendor.yaml": Elsewhere(
            "test_eval.test_the_servers_can_be_in_their_own_recipe"
        ),
        "turnrl export": Elsewhere("test_eval.test_a_record_becomes_a_log_of_inspect_ai"),
        "inspect view": NotRun("it is inspect_ai's own"),
    },
    "docs/howto/settings.md": {
        "my_tools.Weather": Elsewhere(
            "test_secrets.test_a_run_keeps_the_name_of_a_variable_and_its_tool_gets_the_value"
        ),
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
        "pip install '.[environments]'": NotRun("the package index; it is installed"),
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
        "pip install '.[openenv]'": NotRun("the package index; it is installed"),
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
        "pip install '.[gpu]'": NotRun("the package index; the tests use what is installed"),
        "turnrl doctor": NotRun("the hub and a search server; test_doctor.py has smaller recipes"),
        "--plan.profile 24GB": NotRun("the hub and a GPU; test_plan.py applies a profile"),
        "memory plan for": Elsewhere(
            "test_plan.test_the_tables_on_the_page_match_the_computed_plan"
        ),
        "first_gpu.sh": REHEARSED,
        "pip wheel": OFFLINE,
        "pip download": OFFLINE,
        "--no-index": OFFLINE,
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
        "pip install '.[bench]'": NotRun("the package index; the tests use what is installed"),
        "compare.py trl": Elsewhere("test_bench.test_trl_and_turnrl_do_equal_work_in_a_small_case"),
        "vllm serve": NotRun("vLLM has an environment of its own"),
        "compare.py engine": COMPARED,
        "compare.py learn": COMPARED,
        "compare.py tools": COMPARED,
        "compare.py scale": Elsewhere(
            "test_bench.test_a_collection_is_measured_in_a_process_of_its_own"
        ),
        "gpu.py": REHEARSED,
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
        "description: Searches the news of": Elsewhere(
            "test_wiki_search.test_the_documented_pair_of_searches_makes_two_tools_in_one_recipe"
        ),
        "index: indexes/wikipedia": Fits("model.rollout"),
        'index: "http://localhost:8000/retrieve"': Elsewhere(
            "test_outage_retrieve.test_five_lines_of_a_recipe_train_with_the_server_of_the_page"
        ),
        "class_path: Retriever": Fits("model.rollout"),
        "POST {": Elsewhere(
            "test_retrieve.test_the_documented_request_and_answer_match_the_protocol"
        ),
        "fields: {text: body, title: headline}": Fits(),
        "name: news, fields: {text: body}}}'": Elsewhere(
            "test_elasticsearch.test_a_foreign_index_is_searched_by_its_fields"
        ),
        "image: docker": Elsewhere("test_wiki_search.test_the_recipes_in_the_docs_make_tools"),
        "docker compose": NotRun("needs docker; the tests start the server without a container"),
        "export TURNRL_ES_URL": Runs(server=True),
        "turnrl index build --index '{class_path": Runs(("5 passages",), server=True),
        "index info --index '{class_path": Runs(("passages  5",), server=True),
        "index: {class_path: Elasticsearch": Fits("model.rollout"),
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
        "atlas_starter.py": Elsewhere(
            "test_study.test_the_training_of_the_starter_begins_with_its_tokenizer_and_its_batches"
        ),
    },
    "plugins/turnrl-bench/README.md": {"compare.py": COMPARED, "gpu.py": REHEARSED},
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
        'index search "Dom': Runs(("begun in 1321",)),
        "index search --questions": Runs(("answer@",)),
        "index: indexes/corpus": Fits("model.rollout"),
        "tools.help WikiSearch": Runs(("--model.rollout.tools.top_k",), slow=True),
    },
}
