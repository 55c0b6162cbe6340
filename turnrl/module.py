"""MT-GRPO as a LightningModule: the objective, and nothing that Lightning or another module does
better.

    one iteration = one epoch of `ExperienceLoader`
      collect     the policy acts on each question `group_size` times   (rollout.py, an engine)
                  and, if the estimator asks for it, goes on otherwise from each turn
                  rewards score the turns and the outcome                (scoring.py, plugins)
                  the estimator turns scores into advantages of turns    (credit.py, plugins)
                  or tokens; groups that teach nothing may be sampled anew
      learn       the clipped surrogate on per-token advantages          (learning.py, objective.py)
                  and, if the estimator has a critic, what it should have expected

Source: Zeng et al., arXiv 2505.11821. `OutcomeOnly` or `Merged` as the estimator gives the paper's
baselines GRPO-OR and GRPO-MR.
"""

import contextlib
import itertools
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from turnrl import scoring
from turnrl.agent.chat import ChatFormat
from turnrl.agent.rollout import Rollout, stream_seed
from turnrl.callbacks import FirstAndLastValidation
from turnrl.credit import TurnLevel
from turnrl.errors import (
    CheckpointError,
    DataError,
    DeviceMemoryError,
    RecipeError,
    TrainingError,
    at_least,
    blaming,
    out_of_memory,
)
from turnrl.learning import Minibatch, Step, plan, row
from turnrl.objective import ClippedSurrogate
from turnrl.plugins import examine, installed
from turnrl.policy.card import facts_of
from turnrl.policy.model import Policy
from turnrl.run import record
from turnrl.run.folders import run_folder
from turnrl.run.health import LearnsNothing
from turnrl.run.lines import say, take_over
from turnrl.run.metrics import PolicyRows
from turnrl.text import parse_bytes
from turnrl.types import (
    AdvantageEstimator,
    Engine,
    Group,
    Probe,
    Question,
    Reward,
    Row,
    Start,
    Trajectory,
)

_logger = logging.getLogger(__name__)

_TRAIN, _EVALUATE, _ASK = 0, 1, 2
"""First number of every random stream, so that no two purposes share one."""
_MINIBATCH_TOKENS = 16_384
_LOWERS = {
    "loading": "the size of model.policy.model (nf4 in model.policy.quantization takes the least)",
    "sampling": "model.engine.kv_memory or model.engine.prefill_tokens",
    "learning": "model.minibatch_tokens",
}
"""Settings that lower the memory of a phase, the first to change first."""
_SHOWN = ("train/exact_match", "train/tool_execution", "reward/total", "val/exact_match")
"""Metrics that a progress bar shows."""


def _default_engine() -> Engine:
    if (found := installed("turnrl_engines").get("Slots")) is None:
        raise RecipeError("model.engine is not set, and the engine Slots is not installed. Set it.")
    return cast(Engine, found())


class MTGRPO(L.LightningModule):
    """Multi-turn GRPO: trains a policy from its own rollouts, with credit given turn by turn.

    Args:
        policy: The model to train.
        rollout: How the agent acts: turn scheme, tools and limits.
        rewards: Turn rewards and outcome rewards; each kind is summed.
        estimator: From rewards to advantages: `TurnLevel` (MT-GRPO), `OutcomeOnly`, `Merged`.
        objective: The clipped surrogate and its options.
        engine: What samples the policy: `Slots`, in this process.
        group_size: G, trajectories per question.
        redraws: How often groups that would teach nothing, because all their advantages are zero,
            are sampled anew (arXiv 2503.14476 draws until none is left). Questions that are nearly
            always answered, or nearly never, then have a greater share in the gradient.
        updates_per_iteration: How often an iteration's trajectories are learned from.
        steps_per_update: Optimiser steps that one pass over an iteration's trajectories is divided
            into.
        minibatch_tokens: The most tokens computed at once while learning, but one trajectory at
            least; what several begin with in common is counted once. It decides how much memory is
            needed, and nothing else. Null leaves it to `profile`, or takes 16,384.
        optimizer: Any of torch's or of another library, by its class; given what is trained. None
            is AdamW at the paper's rate, 1e-6.
        scheduler: Of the learning rate, by its class; it counts optimiser steps. None keeps the
            rate.
        record_per_iteration: How many trajectories of each iteration are kept in the run's record;
            null keeps all. An evaluation keeps all of its own.
        transcripts_per_iteration: How many of these are written out as text to be read.
        seed: Of sampling and of the order of trajectories.
        profile: The memory of a GPU, such as `24GB`, or `auto` for the one that is there: settings
            that are left null (here, in the policy, in the engine) are chosen to fit. Null chooses
            nothing, and on a CPU `auto` does not either.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        rewards: list[Reward],
        estimator: AdvantageEstimator | None = None,
        objective: ClippedSurrogate | None = None,
        engine: Engine | None = None,
        group_size: int = 16,
        redraws: int = 0,
        updates_per_iteration: int = 1,
        steps_per_update: int = 1,
        minibatch_tokens: int | None = None,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        record_per_iteration: int | None = 64,
        transcripts_per_iteration: int = 4,
        seed: int = 0,
        profile: str | None = "auto",
    ) -> None:
        super().__init__()
        self.policy = policy
        self.rollout = rollout
        self.rewards = rewards
        self.estimator = estimator if estimator is not None else TurnLevel()
        self.objective = objective if objective is not None else ClippedSurrogate()
        self.engine = engine if engine is not None else _default_engine()
        self.policy.critic = self.estimator.critic
        self.group_size = group_size
        self.redraws = redraws
        self.updates_per_iteration = updates_per_iteration
        self.steps_per_update = steps_per_update
        self.minibatch_tokens = minibatch_tokens
        self.optimizer = optimizer or partial(AdamW, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
        self.scheduler = scheduler
        self.record_per_iteration = record_per_iteration
        self.seed = seed
        self.transcripts_per_iteration = transcripts_per_iteration
        self.profile = profile
        self.planned: dict[str, tuple[int, str]] = {}
        """Bytes planned for a phase (`sampling`, `learning`), and the setting that lowers them."""
        self._first_logprobs: dict[int, Tensor] | None = None
        self._folder: Path | None = None
        self._logged = False
        self._names: dict[bool, set[str]] = {False: set(), True: set()}  # by whether it validated
        self._sampling = False
        self._loaded_version = (0, 0)
        self.experience: scoring.Experience | None = None
        self.evaluated: list[record.Row] = []
        counts = ("group_size", "updates_per_iteration", "steps_per_update", "minibatch_tokens")
        at_least(1, "model.", self, *counts)
        kept = ("record_per_iteration", "transcripts_per_iteration")
        at_least(0, "model.", self, *kept, "redraws", "seed")
        if profile not in (None, "auto"):
            parse_bytes(profile, "model.profile", "'auto', null, or ")
        _ = policy.folder  # a missing one is told before any data is read
        name, least = type(self.estimator).__name__, self.estimator.min_group_size
        if group_size < least:
            raise RecipeError(
                f"group_size is {group_size}, but {name} compares {least} trajectories or more. "
                "Raise it (16 is usual), or set baseline: leave_one_out and scale: none."
            )
        at_least(0, f"{name}.", self.estimator, "probes")
        if redraws and self.estimator.critic is not None:
            raise RecipeError(
                f"model.redraws is {redraws}, but with a critic ({name}) no group is without "
                "advantages. Set it to 0."
            )
        if not rewards:
            raise RecipeError("rewards is empty: nothing to learn from. Add one, ExactMatch say.")
        names = [scoring.component_name(reward) for reward in rewards]
        if twice := {name for name in names if names.count(name) > 1}:
            raise RecipeError(
                f"model.rewards has {min(twice)!r} twice. Leave one out, or raise its weight."
            )
        if self.objective.kl_coef > 0 and policy.lora is None:
            raise RecipeError(
                f"objective.kl_coef is {self.objective.kl_coef}, which compares with the policy "
                "without its adapter, but policy.lora is not set. Set it, or set kl_coef to 0."
            )

    # ---------------------------------------------------------------- set-up

    def configure_callbacks(self) -> list[L.Callback]:
        """Callbacks that belong to every run of this module."""
        shown = [] if getattr(self.trainer, "shows_its_own", False) else take_over(self.trainer)
        own = (FirstAndLastValidation, PolicyRows, LearnsNothing)
        trainer: Any = self.trainer
        there = {type(callback) for callback in trainer.callbacks}  # of a fit before this one
        return [*shown, *(kind() for kind in own if kind not in there)]

    def setup(self, stage: str) -> None:
        """Find a recipe's mistakes before any weights are loaded."""
        if self.trainer.precision != "32-true":
            raise RecipeError(
                f"trainer.precision is {self.trainer.precision!r}, but what is trained is kept in "
                "32-true. Leave it out, and set policy.dtype, which is the base's."
            )
        if self.trainer.accumulate_grad_batches != 1:
            raise RecipeError(
                f"trainer.accumulate_grad_batches is {self.trainer.accumulate_grad_batches}, but a "
                "batch is a whole step. Leave it out; model.minibatch_tokens bounds its memory."
            )
        self._folder = run_folder(self.trainer)
        if stage == "fit":
            self._examine()
        self._check()

    def _examine(self) -> None:
        """Have installed checks settle what the recipe leaves open, and stop at what would fail."""
        run = self.trainer
        data = getattr(run, "datamodule", None)
        start = Start(run.strategy.root_device, self, data, self._folder, run.world_size)
        for finding in examine(start):
            text = f"{finding.name}: {finding.text}. {finding.step}".strip()
            if finding.status == "fail":
                raise RecipeError(text)
            if finding.status == "warn" and run.is_global_zero:
                _logger.warning(text)

    def _check(self) -> None:
        self.policy.check_length(self.rollout.max_tokens)
        self.rollout.check(self.chat)
        self.engine.check(self.policy, self.rollout.max_tokens)

    def configure_model(self) -> None:
        """Load the weights onto the device that the strategy chose."""
        run = self._trainer
        say(run, f"loading {self.policy.model}")
        with self._phase("loading"):
            self.policy.load(self.device if run is None else run.strategy.root_device)

    def on_fit_start(self) -> None:
        """On a device whose memory has a hard end, compute a full minibatch once, forward and back:
        a run that lacks memory fails in its first minutes."""
        if self.device.type != "cpu":
            with self._phase("learning"):
                longest = self.rollout.max_tokens  # one such trajectory is a minibatch, at least
                self.policy.try_out(max(self.budget, longest), longest)

    def configure_optimizers(self) -> Any:
        """The recipe's optimiser on what is trained, and its schedule, per optimiser step."""
        trained: list[Any] = list(self.policy.trainable_parameters().values())
        if (head := self.policy.value_head) is not None and self.policy.critic is not None:
            own = list(head.parameters())
            rest = [p for p in trained if all(p is not one for one in own)]
            trained = [{"params": rest}, {"params": own, "lr": self.policy.critic.lr}]
        with blaming(RecipeError, "model.optimizer", "Mend its settings."):
            optimizer = self.optimizer(trained)
        with blaming(RecipeError, "model.scheduler", "Mend its settings."):
            schedule = self.scheduler(optimizer) if self.scheduler is not None else None
        if isinstance(schedule, ReduceLROnPlateau):
            raise RecipeError(
                f"model.scheduler is {type(schedule).__name__}, which waits for a metric. Take one "
                "that counts steps, such as CosineAnnealingLR or LinearLR."
            )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}] if schedule else []

    def _settle(self, checkpoint: dict[str, Any]) -> None:
        """Let the recipe's optimiser and schedule hold in a checkpoint that is to be restored: its
        settings are replaced by theirs, and the schedule is walked anew to where the run stands."""
        (optimizer,), schedules = self.configure_optimizers()
        with warnings.catch_warnings(), blaming(RecipeError, "model.scheduler", "Mend it."):
            warnings.simplefilter("ignore")  # torch wants a step of the optimiser before
            for _ in range(checkpoint["global_step"] if schedules else 0):
                schedules[0]["scheduler"].step()
        checkpoint["lr_schedulers"] = [made["scheduler"].state_dict() for made in schedules]
        (saved,) = checkpoint["optimizer_states"]
        if checkpoint.get("optimizer", [str(AdamW)]) != [str(type(optimizer))]:
            saved["state"] = {}  # another one's moments
        for group, old in zip(optimizer.param_groups, saved["param_groups"], strict=True):
            old |= {name: value for name, value in group.items() if name != "params"}

    def on_train_end(self) -> None:
        """Leave what was trained in the run's folder, in a form that others can load."""
        self._loaded_version = self.iteration_and_version  # of whoever evaluates it next
        if self.trainer.is_global_zero and self._folder:
            kind = "model" if self.policy.lora is None else "adapter"
            facts = facts_of(self._folder, self.trainer.current_epoch, self.trainer.global_step)
            self.policy.export(self._folder / kind, facts)

    def teardown(self, stage: str) -> None:
        """Let the engine go."""
        if self._sampling:
            self.engine.close()
            self._sampling = False

    @cached_property
    def chat(self) -> ChatFormat:
        """The policy's chat format."""
        return ChatFormat(self.policy.tokenizer)

    @property
    def budget(self) -> int:
        """The most tokens computed at once while learning."""
        return self.minibatch_tokens or _MINIBATCH_TOKENS

    def stream(self, iteration: int) -> int:
        """The random stream of an iteration on this rank."""
        return stream_seed(_TRAIN, self.seed, iteration, self.global_rank) % 2**63

    # --------------------------------------------------------------- collect

    def ask(
        self,
        questions: str | Question | Sequence[str | Question],
        samples: int | None = None,
        seed: int = 0,
        temperature: float | None = None,
    ) -> list[Trajectory]:
        """Let the policy answer questions of your own. Needs no Trainer.

        Args:
            questions: Texts, or questions with their accepted answers; or one of them.
            samples: Trajectories to sample for each question; None for one greedy trajectory, or
                for one sample if there is a temperature.
            seed: Of the samples.
            temperature: Of the samples; that of the rollout if None, and 0 for greedy.
        Returns:
            The trajectories, those of one question together; `print` shows the turns of one.
        Raises:
            TurnRLError: As a run would, about the recipe, a tool's world or a question.
        """
        if samples is not None and samples < 1:
            raise RecipeError(f"samples is {samples}; it must be at least 1, or None for greedy")
        if temperature is not None and not 0 <= temperature < math.inf:
            raise RecipeError(f"temperature is {temperature}; give 0 for greedy, or a number above")
        if temperature == 0 and samples is not None:
            same = (
                f"temperature is 0, which is greedy, so {samples} samples would be one. Leave out"
            )
            raise RecipeError(f"{same} samples, or raise temperature.")
        several = [questions] if isinstance(questions, str | Question) else questions
        asked = [
            Question(str(n), question) if isinstance(question, str) else question
            for n, question in enumerate(several)
        ]
        if self._trainer is None:
            self._check()
            self.configure_model()
        size, rollout = samples, self.rollout
        if temperature:
            size, rollout = samples or 1, replace(rollout, temperature=temperature)
        groups, _ = self._explore(asked, size, (_ASK, self.seed, seed), "asking", 0, rollout)
        return [trajectory for group in groups for trajectory in group]

    def scores(self, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
        """The score of each of some trajectories, of one question or of several.

        Args:
            trajectories: From `ask`, of questions with accepted answers.
        Returns:
            The four curves and the rewards, by the names that they have in `metrics.csv`, such as
            `exact_match`, `reward/turn/tool_executed` and `reward/total`.
        Raises:
            DataError: If a question has no accepted answer, as one that was asked as a text.
            PluginError: If a reward raises, or gives something that is not a finite number.
        """
        for trajectory in trajectories:
            if not trajectory.question.answers:
                asked = f"{trajectory.question.text!r} has no accepted answer to compare with"
                raise DataError(f"{asked}. Ask turnrl.Question(id, text, answers) instead.")
        groups = self.score([[trajectory] for trajectory in trajectories])
        return [scoring.group_sums([group], self.rewards) for group in groups]

    def act(
        self, questions: Sequence[Question], size: int | None, key: tuple[int, ...], what: str
    ) -> list[list[Trajectory]]:
        """Trajectories of the policy as it is now: `size` sampled ones per question, or, if None,
        one greedy one. `key` names the random streams, `what` the progress bar."""
        return self._explore(questions, size, key, what, 0)[0]

    def _explore(
        self,
        questions: Sequence[Question],
        size: int | None,
        key: tuple[int, ...],
        what: str,
        probes: int,
        rollout: Rollout | None = None,
    ) -> tuple[list[list[Trajectory]], list[list[Probe]]]:
        """As `act`, with probes; see `Rollout.explore`. `rollout` stands in for the recipe's."""
        run = self._trainer
        shown = run is None or (run.is_global_zero and run.progress_bar_callback is not None)
        bar = what if shown else None
        with self._phase("sampling"):
            if not self._sampling:
                self._start_engine()
                self._sampling = True
            self.engine.sync(self.iteration_and_version[1])
            return (rollout or self.rollout).explore(
                self.engine, self.chat, questions, size or 1, key, probes, size is None, bar
            )

    def _start_engine(self) -> None:
        self.engine.start(self.policy, self.rollout.max_tokens)
        probes = self.estimator.probes
        holds = self.rollout.at_once(self.engine, probes)
        if holds is not None and holds < self.group_size:
            rank_zero_info(
                f"{type(self.engine).__name__} has room for {holds} of a group's "
                f"{self.group_size} trajectories of rollout.max_tokens = "
                f"{self.rollout.max_tokens}{' and their probes' if probes else ''}, and sampling "
                "so few at a time is slow. Give it more memory (model.engine.kv_memory of Slots), "
                "or lower rollout.max_tokens."
            )

    def score(self, trajectories: Sequence[Sequence[Trajectory]]) -> tuple[Group, ...]:
        """The trajectories of each question with their rewards."""
        turns = self.rollout.segmenter.max_turns
        return scoring.score_groups(trajectories, self.rewards, turns, self.policy)

    def collect(self, questions: Sequence[Question], iteration: int) -> scoring.Experience:
        """One iteration's experience on this rank: act, score, give credit."""
        key = (_TRAIN, self.seed, iteration, self.global_rank)
        experience = self._experience(questions, key)
        for again in range(1, self.redraws + 1):
            if not (idle := experience.idle):
                break
            anew = self._experience([questions[i] for i in idle], (*key, again))
            experience = experience.redrawn_by(idle, anew)
            left = len(experience.idle)
            rank_zero_info(f"sampled {len(idle)} groups anew; {left} teach nothing still")
        self.experience, self._logged = experience, False
        at = (iteration + 1, self.global_step, self.global_rank, self.trainer.world_size)
        kept = record.rows(experience.groups, experience.credit, "train", *at)
        if (most := self.record_per_iteration) is not None:
            kept = itertools.islice(kept, -(-most // self.trainer.world_size))
        self._keep(list(kept))
        return experience

    def _experience(
        self, questions: Sequence[Question], key: tuple[int, ...]
    ) -> scoring.Experience:
        """Act on each question once, score, give credit."""
        start = time.perf_counter()
        played, tried = self._explore(
            questions, self.group_size, key, "collecting", self.estimator.probes
        )
        seconds = time.perf_counter() - start
        probed = sum(len(scoring.sampled_turns(p.trajectory)) for more in tried for p in more)
        acted = sum(len(scoring.sampled_turns(t)) for trunks in played for t in trunks)
        if self.estimator.trains_probes:
            grown = zip(played, tried, strict=True)
            played = [[*trunks, *(p.trajectory for p in more)] for trunks, more in grown]
        groups = list(self.score(played))
        if self.estimator.trains_probes:
            groups = list(map(scoring.with_parents, groups, tried))
        elif self.estimator.probes:
            earned = self.score([[p.trajectory for p in more] for more in tried])
            groups = list(map(scoring.with_state_values, groups, tried, earned))
        if self.estimator.critic is not None:
            values = iter(self._token_values([t for group in groups for t in group.trajectories]))
            parts = [tuple(itertools.islice(values, len(group.trajectories))) for group in groups]
            groups = [replace(g, token_values=p) for g, p in zip(groups, parts, strict=True)]
        credit = tuple(scoring.assign_credit(group, self.estimator) for group in groups)
        for_values = 0 if self.estimator.trains_probes else probed
        return scoring.Experience(tuple(groups), credit, seconds, acted + probed, for_values)

    def _token_values(self, trajectories: Sequence[Trajectory]) -> list[Tensor]:
        """The current critic's value of each sampled token of each trajectory."""
        return [values for *_, values in self._now(list(map(row, trajectories)))]

    def _keep(self, rows: Sequence[record.Row]) -> None:
        if self._folder is not None:
            record.keep(rows, self._folder, self.global_rank, self.transcripts_per_iteration)

    # ----------------------------------------------------------------- learn

    def steps(self, questions: int) -> int:
        """The optimiser steps of an iteration in which this process asks so many questions.

        Raises:
            RecipeError: If there are more steps than trajectories.
        """
        trajectories = questions * self.group_size
        if trajectories < self.steps_per_update:
            raise RecipeError(
                f"model.steps_per_update is {self.steps_per_update}, and {questions} questions x "
                f"{self.group_size} = {trajectories} trajectories per process are fewer. Lower it."
            )
        return self.updates_per_iteration * self.steps_per_update

    def iterate(self, questions: Sequence[Question], iteration: int) -> Iterator[Step]:
        """One iteration: collect experience, then give the steps to learn it by."""
        experience = self.collect(questions, iteration)
        torch.manual_seed(self.stream(iteration))  # of dropout, so that resuming is exact
        strategy, device = self.trainer.strategy, self.device
        drops = self.policy.lora is not None and self.policy.lora.dropout > 0  # and so is noisy
        self._first_logprobs = None if drops or self.updates_per_iteration == 1 else {}
        return plan(
            experience.trajectories,
            experience.advantages,
            lambda rows: [logprobs for logprobs, *_ in self._now(rows)],
            self.objective,
            self.updates_per_iteration,
            self.steps_per_update,
            lambda rows: self.policy.passes(rows, self.budget),
            torch.Generator().manual_seed(self.stream(iteration)),
            lambda total: strategy.reduce(total.to(device), reduce_op="mean"),
            experience.returns,
            self.rollout.truncated,
            self._first_logprobs,
        )

    def _now(self, rows: Sequence[Row]) -> list[tuple[Tensor, ...]]:
        """Results of the current learner for sampled tokens; see `Policy.read`."""
        with self._phase("learning"):
            return self.policy.read(rows, self.budget, self.rollout.temperature)

    def training_step(self, batch: Step, batch_idx: int) -> Tensor:
        """One optimiser step. The gradients of all minibatches but the last are added up here; the
        last one's pass is Lightning's, after which processes average what was added up."""
        for parameter in self.policy.parameters():
            parameter.grad = None
        wait = getattr(self.trainer.strategy, "block_backward_sync", contextlib.nullcontext)
        sums: dict[str, Tensor] = {}
        with wait():
            for minibatch in batch[:-1]:
                self._loss(minibatch, sums).backward()
        loss = self._loss(batch[-1], sums)
        watched = dict(zip(sums, torch.stack([*sums.values()]).tolist(), strict=True))
        self._log_sums({"train/loss": watched.pop("loss")}, 1)
        tokens = sum(map(len, batch))
        self._log_sums({f"train/{name}": value for name, value in watched.items()}, tokens)
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's step, in which it calls `training_step` and its backward pass too."""
        with self._phase("learning"):
            super().optimizer_step(*args, **kwargs)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """The boundary to a GPU's memory: if it runs out, say where, and what to change."""
        try:
            yield
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            planned, setting = self.planned.get(name, (None, _LOWERS[name]))
            plan = "" if planned is None else f", planned with {planned / 1e9:.1f} GB"
            first = str(error).strip().partition(". GPU")[0].partition("\n")[0]
            raise DeviceMemoryError(
                f"the GPU's memory ran out while {name}{plan} ({first}). Lower {setting}, or see "
                "'turnrl doctor RECIPE' for what takes how much."
            ) from error

    def optimizer_zero_grad(
        self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer
    ) -> None:
        """Nothing: Lightning calls this after `training_step`, which begins by doing it."""

    def _loss(self, batch: Minibatch, watched: dict[str, Tensor]) -> Tensor:
        """The clipped surrogate of one minibatch; what to watch is added to `watched`, as sums over
        tokens."""
        logprobs, entropy, values = self.policy.logprobs(batch.layout, self.rollout.temperature)
        # before the first update the ratio is 1, not 1 + rounding
        old = logprobs.detach() if batch.old_logprobs is None else batch.old_logprobs
        reference = None
        if self.objective.kl_coef > 0:
            with self.policy.reference(), torch.no_grad():
                reference = self.policy.logprobs(batch.layout, self.rollout.temperature)[0]
        loss, sums = self.objective(
            logprobs,
            old,
            batch.advantages,
            batch.weights,
            reference,
            batch.sampler_logprobs,
            batch.segments(self.objective.ratio_level),
        )
        if batch.returns is not None and self.policy.critic is not None:
            missed = (batch.returns - values).square() / 2
            loss = loss + self.policy.critic.coef * (missed * batch.weights).sum()
            sums["value_loss"] = missed.detach().sum()
        if not loss.isfinite():
            raise self._broken(f"the loss is {float(loss.detach())}")
        sums |= {"loss": loss.detach(), "entropy": entropy.sum()}
        if batch.old_logprobs is None:
            sums["logprob_gap"] = (logprobs.detach() - batch.sampler_logprobs).abs().sum()
            if self._first_logprobs is not None:
                numbers, counts = batch.trajectory.unique_consecutive(return_counts=True)
                parts = logprobs.detach().cpu().split(counts.tolist())
                self._first_logprobs.update(zip(numbers.tolist(), parts, strict=True))
        for name, value in sums.items():  # which stay on the device until the step is over
            watched[name] = watched.get(name, 0) + value.detach().double()
        return loss

    def on_train_batch_start(self, batch: Step, batch_idx: int) -> None:
        """Log what was collected, once an iteration."""
        if self.experience is None or self._logged:
            return
        self._logged = True
        found = scoring.rollout_sums(self.experience)
        for name, value in scoring.group_sums(self.experience.groups, self.rewards).items():
            found[name if name.startswith("reward/") else f"train/{name}"] = value
        self._log_sums(found, sum(len(group.trunks) for group in self.experience.groups))
        seconds = self.experience.seconds
        rate = self.experience.sampled / max(seconds, 1e-9)
        self._log_sums({"rollout/seconds": seconds, "rollout/tokens_per_s": rate}, 1)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Stop before a step that would ruin the weights."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if not norm.isfinite():
            raise self._broken(f"the gradient's norm is {float(norm)}")
        self._log("train/grad_norm", float(norm))

    def _broken(self, what: str) -> TrainingError:
        iteration, step = self.iteration_and_version
        return TrainingError(
            f"{what} at step {step} (iteration {iteration}). Lower the learning rate "
            "(model.optimizer.lr) or trainer.gradient_clip_val, and go on from a checkpoint of "
            "before."
        )

    def _log_sums(self, sums: Mapping[str, float], count: float, weigh: bool = False) -> float:
        """Log the means of a batch over all processes, given this one's sums and count.

        One figure results per iteration or evaluation: the mean over its batches, weighed by their
        counts if `weigh`. `answer_in_results` is a mean over the trajectories that are `findable`,
        and there is none without any.

        Returns:
            The count over all processes.
        """
        # a process without any has sums of integers, and the others would not understand it
        mine = torch.tensor([count, *sums.values()], dtype=torch.float32, device=self.device)
        total, *values = self.trainer.strategy.reduce(mine, reduce_op="sum").tolist()
        found = dict(zip(sums, values, strict=True))
        for name, value in found.items():
            split, _, figure = name.rpartition("/")
            few = found[f"{split}/findable"] if figure == "answer_in_results" else total
            if few:
                self._log(name, value / few, int(few) if weigh else 1)
        return float(total)

    def _log(self, name: str, value: float, weight: int = 1, **more: Any) -> None:
        # what is logged is the same in every process: a progress bar may read it in one alone,
        # which must not wait for the others (`sync_dist` with `rank_zero_only` reduces nothing)
        options = {"on_step": False, "on_epoch": True, "sync_dist": True, "rank_zero_only": True}
        options |= {"logger": False, "prog_bar": name in _SHOWN}
        if not self.trainer.sanity_checking:
            self._names[self.trainer.validating].add(name)
        self.log(name, value, batch_size=weight, **options, **more)  # type: ignore[arg-type]

    def take_figures(self, validating: bool) -> dict[str, float]:
        """Figures logged of a validation, or of training, that were not taken before."""
        found, names = self.trainer.callback_metrics, self._names[validating]
        taken = {name: float(found[name]) for name in sorted(names) if name in found}
        names.clear()
        return taken

    # -------------------------------------------------------------- evaluate

    def on_validation_epoch_start(self) -> None:
        """Begin a record of what is evaluated."""
        self.evaluated = []

    def validation_step(self, batch: list[Question], batch_idx: int) -> None:
        """Score greedy trajectories, one per question; a process may have none in a batch."""
        split = getattr(getattr(self.trainer, "datamodule", None), "split", "val")
        key = (_EVALUATE, self.seed, batch_idx, self.global_rank)
        groups = self.score(self.act(batch, None, key, "evaluating")) if batch else ()
        rank, ranks = self.global_rank, self.trainer.world_size
        at = (*self.iteration_and_version, len(self.evaluated) * ranks + rank, ranks)
        self.evaluated += record.rows(groups, [None] * len(groups), split, *at)
        found = scoring.group_sums(groups, self.rewards)
        named = {f"{split}/{name}": value for name, value in found.items()}
        total = self._log_sums(named, len(batch), weigh=True)
        if self.trainer.state.fn != "fit":
            self._log(f"{split}/questions", total, reduce_fx="sum")

    def on_validation_epoch_end(self) -> None:
        """Keep the whole record of an evaluation."""
        self._keep(self.evaluated)

    @property
    def iteration_and_version(self) -> tuple[int, int]:
        """Iterations that the policy has learned from, the one that is going on included, and
        optimiser steps."""
        if self._trainer is not None and self.trainer.state.fn == "fit":
            return self.trainer.fit_loop.epoch_progress.current.ready, self.global_step
        return self._loaded_version

    # ----------------------------------------------------------- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep only what is trained, and whose it is."""
        self._check_weights()
        state = self.policy.trainable_state()
        checkpoint["state_dict"] = {f"policy.{name}": value for name, value in state.items()}
        checkpoint["policy_identity"] = self.policy.identity
        checkpoint["optimizer"] = [str(type(made)) for made in self.trainer.optimizers]

    def _check_weights(self) -> None:
        """Refuse to keep a policy that can no longer act, in the place of one that could.

        A step can ruin weights and leave them finite: the next forward pass is not.
        """
        if self.experience is None:
            return
        ((logprobs, _, values),) = self._now([row(self.experience.trajectories[0])])
        for what, found in (("the policy's log-probabilities", logprobs), ("its values", values)):
            if not found.isfinite().all():
                raise self._broken(f"{what} are not finite")

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse a checkpoint of another policy.

        Raises:
            CheckpointError: Naming what differs.
        """
        if "policy_identity" not in checkpoint:
            raise CheckpointError("this checkpoint names no policy. Give one of 'turnrl fit'.")
        names = {name.removeprefix("policy.") for name in checkpoint["state_dict"]}
        fit = self._trainer is not None and self.trainer.state.fn == "fit"
        if not fit and self.policy.critic is None:  # who does not learn needs no critic
            names -= {"value_head.weight", "value_head.bias"}
        self.policy.check_identity(checkpoint["policy_identity"], names)
        steps = checkpoint["global_step"]
        current = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_progress", {})
        # a checkpoint that is saved after a run counts one epoch more
        iterations = current.get("current", {}).get("ready", checkpoint["epoch"] + 1)
        self._loaded_version = (iterations if steps else 0), steps
        own = type(self).configure_optimizers is MTGRPO.configure_optimizers
        if own and fit and "optimizer_states" in checkpoint:  # else Lightning says what it lacks
            self._settle(checkpoint)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the trained weights, which are all that a checkpoint holds; `on_load_checkpoint` is
        strict."""
        found = super().load_state_dict(state_dict, strict=False)
        found.missing_keys.clear()
        return found
