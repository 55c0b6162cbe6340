"""A policy or a checkpoint, asked one's own questions from Python."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

import turnrl
from commands import RECIPE, fails, save
from runs import adamw, data, last, make_module, rows, trainer, weights
from turnrl import MTGRPO, Policy, Question, QuestionData, RecipeError, Rollout
from turnrl.cli import main
from turnrl.plugin.errors import CheckpointError, TrainingError
from turnrl.policy.settings import Lora
from turnrl.runs import record
from turnrl.types import OutcomeReward
from turnrl.watch.checkpoints import BestCheckpoint
from turnrl_slots import Slots
from worlds import Answered, Called, Echo, Letters, Numbers


@pytest.fixture
def run(trained, tmp_path):
    """A folder in which `recipe.yaml` has trained one iteration."""
    return tmp_path


def test_a_checkpoint_answers_the_users_own_questions(run, capsys):
    agent = turnrl.load("runs/recipe/version_0/checkpoints/last.ckpt")
    first, second = agent.ask(["Number 7?", Question("x", "Number 8?", ("8",))])
    assert (first.question.text, second.question.answers) == ("Number 7?", ("8",))
    assert first.ended_by in ("answer", "turns", "length")
    # the weights are those of the checkpoint
    saved = torch.load("runs/recipe/version_0/checkpoints/last.ckpt", weights_only=True)
    for name, value in saved["state_dict"].items():
        assert torch.equal(agent.state_dict()[name], value)
    # asked again it is the same, greedily; samples differ by number and by seed
    assert agent.ask(["Number 7?"])[0].sample.token_ids == first.sample.token_ids
    samples = agent.ask(["Number 7?", "Number 8?"], samples=8)
    assert [t.question.text for t in samples] == ["Number 7?"] * 8 + ["Number 8?"] * 8
    assert len({t.sample.token_ids for t in samples[:8]}) > 1
    again, other = agent.ask(["Number 7?"], 8), agent.ask(["Number 7?"], 8, seed=1)
    assert [t.sample.token_ids for t in again] == [t.sample.token_ids for t in samples[:8]]
    assert [t.sample.token_ids for t in other] != [t.sample.token_ids for t in again]
    # the evaluation's own greedy trajectories are these
    assert main(["eval", "recipe.yaml", "--ckpt_path", "last"]) == 0
    rows = record.read("runs/recipe-eval/version_0/record")
    questions = Numbers().questions("val")
    texts = [[turn["text"] for turn in row["turns"]] for row in rows]
    assert texts == [[turn.text for turn in t.turns] for t in agent.ask(questions)]


@pytest.mark.slow
def test_a_folder_of_a_run_and_a_recipe_are_loaded_too(run):
    trained, untrained = turnrl.load("runs/recipe/version_0"), turnrl.load("recipe.yaml")
    assert not torch.equal(weights(trained.policy), weights(untrained.policy))
    fresh = Policy(untrained.policy.settings.model).build()
    fresh.load()
    assert torch.equal(weights(untrained.policy), weights(fresh))
    assert untrained.ask(["Number 7?"])[0].turns


def test_load_refuses_a_path_or_module_of_the_wrong_type(tiny_model):
    with pytest.raises(TypeError, match=r"^path is None\. Give a run, a checkpoint or a recipe"):
        turnrl.load(None)
    for wrong in ("x", MTGRPO, Policy(str(tiny_model)).build()):
        with pytest.raises(TypeError, match=r"^module is .* Pass an instance of MTGRPO"):
            turnrl.load("runs/a", module=wrong)


@pytest.fixture
def by_hand(tiny_model, tmp_path, monkeypatch):
    """A run of a plain trainer with Lightning's own checkpoints, logger and callbacks, and the
    module that it trained."""
    monkeypatch.chdir(tmp_path)
    module = make_module(tiny_model)
    options = {"accelerator": "cpu", "log_every_n_steps": 1, "enable_progress_bar": False}
    L.Trainer(max_epochs=1, enable_model_summary=False, **options).fit(module, data())
    return module, Path("lightning_logs/version_0")


def same(first, second):
    return torch.equal(weights(first.policy), weights(second.policy))


@pytest.mark.slow
def test_a_run_from_python_is_loaded_by_any_door_into_a_module_or_by_a_recipe(
    by_hand, tiny_model, capsys
):
    module, run = by_hand
    (kept,) = (run / "checkpoints").iterdir()
    assert kept.name == "epoch=0-step=2.ckpt"
    save(json.loads(json.dumps(RECIPE).replace("MODEL", str(tiny_model))))
    answer = module.ask("Number 7?")[0].answer
    for door in ("lightning_logs", run, run / "checkpoints", kept, run / "model"):
        fresh = make_module(tiny_model)
        assert turnrl.load(door, module=fresh) is fresh
        assert same(fresh, module)
        assert fresh.ask("Number 7?")[0].answer == answer
        assert same(turnrl.load("recipe.yaml", checkpoint=door), module)
        capsys.readouterr()
        assert main(["play", "recipe.yaml", "Number 7?", "--checkpoint", str(door)]) == 0
        shown = capsys.readouterr()
        assert f"{run}/" in shown.err
        assert shown.err.endswith("rolled out with recipe.yaml\n")
        assert f"answer     {answer!r}; ended by" in shown.out
        # alone it does not say how it acts
        message = fails(capsys, ["play", str(door), "Number 7?"])
        assert "has no recipe: it was made from Python" in message
        assert (
            "Give a recipe: 'turnrl play RECIPE --checkpoint lightning_logs/version_0/" in message
        )
        assert ", module=module).ask('a question')." in message
        assert "Wait for" not in message
    with pytest.raises(
        RecipeError, match=r"'recipe\.yaml' is a recipe, and has no trained weights"
    ):
        turnrl.load("recipe.yaml", module=make_module(tiny_model))
    few = ["--data.val_limit", "1"]
    for door in (run, kept, run / "model"):
        assert main(["eval", "recipe.yaml", "--ckpt_path", str(door), *few]) == 0
        assert f"checkpoint {kept}\n" in capsys.readouterr().out
    message = fails(capsys, ["eval", str(run)])
    assert message.endswith("Give a recipe, and the run after it: RECIPE --ckpt_path " + str(run))


@pytest.mark.slow
def test_a_run_from_python_without_checkpoints_has_its_exported_policy(by_hand, tiny_model, capsys):
    module, run = by_hand
    shutil.rmtree(run / "checkpoints")
    save(json.loads(json.dumps(RECIPE).replace("MODEL", str(tiny_model))))
    shutil.copytree(run / "model", "moved")
    for door in (run, run / "model"):
        assert same(turnrl.load(door, module=make_module(tiny_model)), module)
    assert same(turnrl.load("recipe.yaml", checkpoint="moved"), module)
    assert main(["play", "recipe.yaml", "Number 7?", "--checkpoint", "moved"]) == 0
    capsys.readouterr()
    message = fails(capsys, ["eval", "recipe.yaml", "--ckpt_path", str(run)])
    options = f"--ckpt_path null --model.policy.model {run}/model"
    assert message.endswith(f"no checkpoint in '{run}'. Take its model as the policy: {options}")
    assert main(["eval", "recipe.yaml", *options.split()]) == 0


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of peft
def test_an_exported_adapter_is_taken_by_the_policy_that_it_is_of(tiny_model, tmp_path):
    lora = {"lora": Lora(r=4)}
    module = make_module(tiny_model, lora)
    options = {"enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    logger = CSVLogger(str(tmp_path), "", 0)
    L.Trainer(max_epochs=1, logger=logger, log_every_n_steps=1, **options).fit(module, data())
    adapter = tmp_path / "version_0" / "adapter"
    for door in (tmp_path / "version_0", adapter):
        assert same(turnrl.load(door, module=make_module(tiny_model, lora)), module)
    for other in (None, {"lora": Lora(r=8)}, {"lora": Lora(r=4, alpha=8)}):
        with pytest.raises(CheckpointError, match=r"has the adapter \{'r': 4, 'alpha': 32\}, and"):
            turnrl.load(adapter, module=make_module(tiny_model, other))
    few = {"lora": Lora(r=4, target_modules=["q_proj"])}
    with pytest.raises(CheckpointError, match=r"do not fit the policy .*lora_A"):
        turnrl.load(adapter, module=make_module(tiny_model, few))


def test_lightnings_own_loading_works_on_a_checkpoint_that_python_made(tiny_model, tmp_path):
    module = make_module(tiny_model)
    trainer(tmp_path, 1, limit_val_batches=0).fit(module, data())
    rollout = Rollout(Letters(), [Echo()], max_turn_tokens=6, max_tokens=128)
    loaded = MTGRPO.load_from_checkpoint(
        last(tmp_path), policy=Policy(str(tiny_model)), rollout=rollout, rewards=[Answered()]
    )
    assert torch.equal(weights(loaded.policy), weights(module.policy))
    (first,), (second,) = (agent.ask(["Number 7?"]) for agent in (loaded, module))
    assert first.sample.token_ids == second.sample.token_ids


def test_attempts_are_scored_and_credited(tiny_model):
    module = make_module(tiny_model)
    attempts = module.ask([Question("x", "Number 7?", ("7",))], samples=4)
    group = turnrl.score_group(attempts, module.rewards)
    assert group.turn_rewards.shape == (4, max(len(t.turns) for t in attempts))
    advantages = turnrl.assign_credit(group, module.estimator).turns
    assert advantages.shape == group.turn_rewards.shape
    assert advantages.isfinite().all()


def test_a_trajectory_shows_itself_without_a_wall_of_ids(tiny_model):
    (trajectory,) = make_module(tiny_model).ask(["Number 7?"])
    assert len(repr(trajectory)) < 200
    assert "Number 7?" in repr(trajectory)
    printed = str(trajectory)
    assert "Number 7?" in printed
    assert trajectory.turns[0].text in printed
    assert all(result.content in printed for result in trajectory.results)
    for shown in (printed, repr(trajectory)):
        assert str(trajectory.sample.prompt_ids[0:2])[1:-1] not in shown


def test_data_takes_questions_and_sources_with_settings(tiny_model, tmp_path):
    own = [Question(f"q{n}", f"Number {n}?", (str(n),)) for n in range(8)]
    module = make_module(tiny_model)
    mine = QuestionData(own, Numbers(), questions_per_iteration=4)
    trainer(tmp_path, 1).fit(module, mine)
    asked = {group.question.text for group in module.experience.groups}
    assert asked <= {question.text for question in own}
    assert len(rows(tmp_path)) == 2


# ------------------------------------------------------------------------------- checkpoints


class Scripted(OutcomeReward):
    """Gives the evaluations the scores of a list, whatever the policy does."""

    def __init__(self, scores):
        self.scores, self.module = scores, None

    def score(self, trajectory):
        if not trajectory.question.id.startswith("n10"):
            return float(len(trajectory.turns))  # of training
        return self.scores[self.module.global_step // 2]


def scripted(model, scores, **options):
    """A run whose evaluation after iteration n scores `scores[n]`."""
    module = make_module(model, **options)
    module.rewards = [Scripted(scores), Called()]
    object.__setattr__(module.rewards[0], "module", module)
    return module


def test_the_best_policy_is_chosen_by_a_fresh_figure_and_resumes_exactly(tiny_model, tmp_path):
    scores = [9.0, 1.0, 3.0, 2.0, 0.0]
    best = BestCheckpoint("val/reward/outcome")
    trainer(tmp_path / "whole", 4, [best]).fit(scripted(tiny_model, scores), data())
    path = tmp_path / "whole" / "version_0" / "checkpoints" / "best.ckpt"
    # the untrained policy's 9 is no reason to keep the first iteration for ever
    assert torch.load(path, weights_only=True)["epoch"] == 1
    assert {p.name for p in path.parent.iterdir()} == {"best.ckpt", "last.ckpt"}
    module = scripted(tiny_model, scores)
    trainer(tmp_path / "on", 4).fit(module, data(), ckpt_path=str(path))
    assert rows(tmp_path / "on") == rows(tmp_path / "whole")[-2:]


@pytest.mark.slow
def test_figures_that_are_not_fresh_choose_nothing(tiny_model, tmp_path):
    best = BestCheckpoint("val/reward/outcome", "min")
    module = scripted(tiny_model, [0.0, 9.0, 5.0, 1.0, 7.0])
    trainer(tmp_path, 4, [best], check_val_every_n_epoch=2).fit(module, data())
    path = tmp_path / "version_0" / "checkpoints" / "best.ckpt"
    assert torch.load(path, weights_only=True)["epoch"] == 1


def test_ruined_weights_replace_no_good_checkpoint(tiny_model, tmp_path):
    module = make_module(tiny_model, steps_per_pass=1, optimizer=adamw(1e30))
    with pytest.raises(TrainingError, match="log-probabilities are not finite"):
        trainer(tmp_path, 3, limit_val_batches=0).fit(module, data())
    assert weights(module.policy).isfinite().all()  # so it is not the numbers that tell
    assert weights(module.policy).abs().max() > 1e20
    saved = torch.load(last(tmp_path), weights_only=True)
    assert saved["global_step"] == 0
    sane = make_module(tiny_model, steps_per_pass=1, optimizer=adamw(1e-3))
    trainer(tmp_path / "b", 1, limit_val_batches=0).fit(sane, data(), ckpt_path=last(tmp_path))
    assert weights(sane.policy).abs().max() < 1e3


@pytest.mark.slow
def test_a_checkpoint_inside_an_iteration_is_named_by_its_own_step(tiny_model, tmp_path):
    every = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=1, save_top_k=-1)
    trainer(tmp_path, 2, [every]).fit(make_module(tiny_model), data())
    names = {p.name for p in (tmp_path / "kept").iterdir()}
    assert names == {f"epoch={n // 2}-step={n + 1}.ckpt" for n in range(4)}


def test_weights_changed_since_validation_are_not_saved_as_best(tiny_model, tmp_path):
    # three steps an iteration, a validation after the second: the third one's weights differ
    best = BestCheckpoint("val/reward/total")
    module = make_module(tiny_model, steps_per_pass=3)
    trainer(tmp_path, 2, [best], val_check_interval=2).fit(module, data())
    assert not (tmp_path / "version_0" / "checkpoints" / "best.ckpt").exists()


def test_asking_draws_other_samples_than_training_and_by_the_runs_seed(tiny_model):
    module, other = make_module(tiny_model), make_module(tiny_model, seed=1)
    question = Numbers().questions("train")[0]
    asked = [t.sample.token_ids for t in module.ask(question, samples=8)]
    assert asked != [t.sample.token_ids for t in other.ask(question, samples=8)]
    collected = module.rollout.play(module.engine, module.chat, [question], 8, (0, 0, 0), False)[0]
    assert asked != [t.sample.token_ids for t in collected]
    (trajectory,) = module.ask(question.text)
    assert trajectory.question.text == question.text
    with pytest.raises(RecipeError, match="samples is 0"):
        module.ask(question, samples=0)


def test_a_run_samples_with_other_settings_than_a_question_before_it(tiny_model, tmp_path):
    module = make_module(tiny_model, {"lora": Lora(r=4)})
    module.ask("Number 7?")
    assert module.engine.active_choices["weights while sampling"] == "base and adapter"
    module.collector.close()
    module.use_engine(Slots(decode_weights="dense"))
    trainer(tmp_path, 1, limit_val_batches=0).fit(module, data())
    assert module.engine.active_choices["weights while sampling"] == "base, dense, and adapter"


def test_samples_have_the_temperature_that_is_asked_for(tiny_model):
    module = make_module(tiny_model, rollout={"temperature": 0.7})
    module.policy.load()
    question = "Number 7?"
    (greedy,) = module.ask(question)
    assert [t.sample.token_ids for t in module.ask(question, temperature=0)] == [
        greedy.sample.token_ids
    ]
    cold, own = module.ask(question, 4, temperature=0.01), module.ask(question, 4)
    same = module.ask(question, 4, temperature=0.7)
    assert [t.sample.token_ids for t in same] == [t.sample.token_ids for t in own]
    assert {t.sample.token_ids for t in cold} != {t.sample.token_ids for t in own}
    # the log-probabilities are those of the tempered distribution: nearly certain, nearly uniform
    first = [
        p for p, k in zip(cold[0].sampler_logprobs, cold[0].sampled_turns, strict=True) if not k
    ]
    assert sum(first) > -1e-3
    (hot,) = module.ask(question, temperature=1000.0)
    vocabulary = module.policy.config.vocab_size
    assert hot.sampler_logprobs[0] == pytest.approx(-math.log(vocabulary), abs=0.2)
    assert module.rollout.temperature == 0.7
    for wrong in (-1, math.nan):
        with pytest.raises(RecipeError, match=f"temperature is {wrong}"):
            module.ask(question, temperature=wrong)
    with pytest.raises(RecipeError, match=r"temperature is 0, which is greedy, so 4 samples"):
        module.ask(question, 4, temperature=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": "a"}, "seed is the string 'a'; it must be a whole number"),
        ({"seed": -1}, "seed is -1; it must be at least 0"),
        ({"samples": 2.5}, r"samples is 2\.5; it must be a whole number"),
        ({"temperature": "hot"}, "temperature is the string 'hot'; it must be a number"),
    ],
)
def test_how_to_sample_is_checked_before_any_weights_are_loaded(tiny_model, settings, message):
    module = make_module(tiny_model)
    with pytest.raises(RecipeError, match=f"^{message}$"):
        module.ask("Number 7?", **{"samples": 2, **settings})
    assert module.policy.network is None


@pytest.mark.parametrize("asked", [5, [5], None, {"a": 1}], ids=str)
def test_asking_anything_but_questions_is_refused_with_examples(tiny_model, asked):
    module = make_module(tiny_model)
    module.policy.load()
    with pytest.raises(RecipeError, match=r"cannot ask .*; ask texts, or turnrl"):
        module.ask(asked)


def test_attempts_at_asked_questions_can_be_scored(tiny_model):
    module = make_module(tiny_model)
    asked = [Question("a", "Number 7?", ("7",)), Question("b", "Number 8?", ("8",))]
    tried = module.ask(asked, samples=3)
    scores = module.scores(tried)
    assert len(scores) == 6
    for attempt, score in zip(tried, scores, strict=True):
        calls = sum(0.1 * len(turn.results) for turn in attempt.turns)
        answered = float(attempt.answer is not None)
        assert score["reward/outcome/answered"] == score["reward/outcome"] == answered
        assert score["reward/turn"] == pytest.approx(calls)
        assert score["reward/total"] == pytest.approx(calls + answered)
        assert score["exact_match"] == float(attempt.answer in attempt.question.answers)
        assert {"tool_execution", "answer_in_results", "format"} < set(score)
    assert len({score["reward/total"] for score in scores}) > 1
    with pytest.raises(turnrl.DataError, match=r"'Number 7\?' has no accepted answer"):
        module.scores(module.ask("Number 7?"))


@pytest.mark.slow
def test_no_code_beside_a_checkpoint_is_imported(run):
    folder = run / "runs" / "recipe" / "version_0" / "checkpoints"
    (folder / "lurking.py").write_text("from worlds import Echo\n")
    saved = torch.load(folder / "last.ckpt", weights_only=True)
    saved["recipe"] = saved["recipe"].replace("worlds.Echo", "lurking.Echo")
    torch.save(saved, folder / "last.ckpt")
    with pytest.raises(RecipeError, match="No module named 'lurking'"):
        turnrl.load(folder / "last.ckpt")


def test_a_part_that_is_exchanged_between_two_questions_holds(tiny_model):
    module = make_module(tiny_model)
    attempts = module.ask([Question("x", "Number 7?", ("7",))])
    module.rewards = [Answered()]
    (score,) = module.scores(attempts)
    assert {name for name in score if "/" in name} == {
        *("reward/outcome/answered", "reward/turn", "reward/outcome", "reward/total")
    }
