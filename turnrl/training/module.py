"""MT-GRPO as a LightningModule: the algorithm, and nothing that belongs in another module.

    one iteration = one epoch of `ExperienceLoader`
      collect     the policy acts on each question `group_size` times   (collection.py, an engine)
                  rewards score the turns and the outcome                (rewards/, plugins)
                  the estimator turns scores into advantages             (credit/, plugins)
      learn       the objective: a sampled token is made more likely,    (learning.py, objectives/)
                  or less, by the advantage of its turn
                  and, if the estimator has a critic, its value loss

Lightning calls, in this order (lifecycle.py has what is not here):

    configure_callbacks, setup, configure_model    the recipe is checked, then the weights load
    an epoch:  ExperienceLoader.__iter__ -> iterate         collects, then yields step by step
                   on_train_batch_start                     logs what was collected
                   training_step -> loss                    a step's minibatches, forward and back
                   on_before_optimizer_step, the optimiser
                   on_train_batch_end
               validation_step                              if a validation is due
               on_save_checkpoint                           refuses to save a broken policy
    the next epoch's beginning, or on_train_end: rows of metrics and of the console are written

Source: Zeng et al., arXiv 2505.11821. `OutcomeOnly` or `Merged` as the estimator gives the paper's
baselines GRPO-OR and GRPO-MR.
"""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial, reduce
from pathlib import Path
from typing import Any, cast, final

import lightning as L
import torch
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from turnrl.agent.rollout import Rollout
from turnrl.credit.earnings import tally_earnings
from turnrl.credit.estimators import TurnLevel, assign_credit
from turnrl.objectives.applying import check_needs, compute_loss
from turnrl.objectives.clipped import ClippedSurrogate
from turnrl.plugin.errors import RecipeError, check_instance
from turnrl.plugin.hooks import load_class
from turnrl.plugin.text import format_count
from turnrl.policy.layout import ForwardPass
from turnrl.policy.memory import peak_bytes
from turnrl.policy.scoring import score_trajectories
from turnrl.policy.settings import Policy
from turnrl.rewards import scoring
from turnrl.rewards.scoring import Tally, convert_rewards
from turnrl.training.checkpoints import read_safely
from turnrl.training.checks import check_settings
from turnrl.training.collection import Collector
from turnrl.training.experience import Evaluated, Experience
from turnrl.training.learning import (
    LearningSettings,
    Minibatch,
    OldLogprobs,
    Step,
    TokenColumns,
    iteration_steps,
)
from turnrl.training.lifecycle import PolicyModule
from turnrl.training.loader import IterationData
from turnrl.types import (
    AdvantageEstimator,
    EngineSettings,
    Group,
    Objective,
    Question,
    Reward,
    TokenRow,
    Trajectory,
)
from turnrl.types.streams import EVALUATE, TRAIN, stream_seed
from turnrl.watch.trainer import get_data_module


def _default_engine() -> EngineSettings:
    if (default := load_class("turnrl_engines", "Slots")) is None:
        raise RecipeError("model.engine is not set, and the engine Slots is not installed. Set it.")
    return cast(EngineSettings, default())


@final
class MTGRPO(PolicyModule):
    """Multi-turn GRPO: trains a policy from its own rollouts, with credit given turn by turn.

    Args:
        policy: The model to train.
        rollout: How the agent acts: segmenter, tools and limits.
        rewards: Turn rewards and outcome rewards; each kind is summed. Functions of an attempt, or
            of an attempt and a turn, may stand among them by their dotted paths.
        estimator: From rewards to advantages: `TurnLevel` (MT-GRPO), `OutcomeOnly`, `Merged`.
        objective: From sampled tokens to a loss, by default `ClippedSurrogate`.
        engine: Samples the policy, by default `Slots`, in this process.
        group_size: G, trajectories per question.
        max_staleness: The most iterations by which the sampling weights may be older than the
            learning ones. With 0, sampling and learning take turns. With 1, the next iteration is
            sampled while the policy learns from this one. Above 0 it needs an engine that keeps
            `max_staleness` + 1 versions of the weights, and an objective that corrects for older
            weights (`objective.importance_cap`, which is on for `VLLM` and `SGLang`).
        redraws: How many times to redraw groups that would teach nothing, because all their
            advantages are zero (arXiv 2503.14476 redraws until none is left). This gives more
            weight to questions that the policy answers nearly always or nearly never. Metrics of
            answers and rewards come from the first draw. The record has the groups that the policy
            learns from.
        passes_per_iteration: How many passes to make over an iteration's trajectories.
        steps_per_pass: Optimiser steps in one pass over an iteration's trajectories.
        optimizer: Any optimiser of torch or another library, by its class. None is AdamW at the
            paper's rate, 1e-6.
        scheduler: Schedule of the learning rate, by its class; it counts optimiser steps. None
            keeps the rate.
        gpu_memory: The memory of a GPU, such as `24GB`, or `auto` for this machine's GPU. The
            settings that are null in the policy and in the engine are chosen to fit it. Null
            chooses nothing, and neither does `auto` on a CPU.
        seed: Seed of sampling and of the order of trajectories.
    """

    def __init__(
        self,
        policy: Policy,
        rollout: Rollout,
        rewards: list[Reward | Callable[..., Any]],
        estimator: AdvantageEstimator | None = None,
        objective: Objective | None = None,
        engine: EngineSettings | None = None,
        group_size: int = 16,
        max_staleness: int = 0,
        redraws: int = 0,
        passes_per_iteration: int = 1,
        steps_per_pass: int = 1,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] | None = None,
        scheduler: Callable[[Optimizer], LRScheduler] | None = None,
        gpu_memory: str | None = "auto",
        seed: int = 0,
    ) -> None:
        paper = partial(AdamW, lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0)
        optimizer = paper if optimizer is None else optimizer
        engine = _default_engine() if engine is None else engine
        estimator = estimator if estimator is not None else TurnLevel()
        objective = objective if objective is not None else ClippedSurrogate()
        check_instance(Policy, "policy", policy)
        check_instance(Rollout, "rollout", rollout)
        check_instance(EngineSettings, "engine", engine)
        check_instance(AdvantageEstimator, "estimator", estimator)
        check_instance(Objective, "objective", objective)
        check_needs(objective)
        model = policy.build(estimator.critic)
        super().__init__(model, rollout, engine, optimizer, scheduler, seed)
        self.rewards = convert_rewards(rewards)
        self.estimator = estimator
        self.objective = objective.for_engine(self.engine)
        self.group_size = group_size
        self.max_staleness = max_staleness
        self.redraws = redraws
        self.gpu_memory = gpu_memory
        self.passes_per_iteration = passes_per_iteration
        self.steps_per_pass = steps_per_pass
        self.experience: Experience | None = None
        """The experience of the last iteration."""
        self._unlogged: Experience | None = None
        self._samples: int | None = None
        self._evaluated: list[Group] = []
        _ = model.folder  # raises if the folder is missing, before any data is read
        check_settings(self)

    # --------------------------------------------------------------- collect

    @cached_property
    def collector(self) -> Collector:
        """Lets the policy act, and scores what it did."""
        return Collector(self)

    def collect(
        self,
        questions: Sequence[Question],
        iteration: int,
        ahead: Sequence[Sequence[Question]] = (),
    ) -> Experience:
        """The experience of one iteration in this process. Groups that would teach nothing are
        sampled anew, up to `redraws` times.

        Args:
            questions: What to ask.
            iteration: The iteration's number.
            ahead: The questions of the next iterations. Their sampling begins, too.
        """
        key = self._key(iteration)
        for number, asked in enumerate([questions, *ahead], iteration):
            bar = self.bar("collecting") if number == iteration else None
            self.collector.begin(asked, self._key(number), bar)
        experience = self._experience(key)
        for redraw in range(1, self.redraws + 1):
            if not (degenerate := experience.degenerate_groups):
                break
            again = [questions[i] for i in degenerate]
            self.collector.begin(again, (*key, redraw), self.bar("collecting"))
            experience = experience.with_redrawn(degenerate, self._experience((*key, redraw)))
            left = len(experience.degenerate_groups)
            rank_zero_info(
                f"resampled {format_count(len(degenerate), 'group')}; {left} still have zero "
                "advantages"
            )
        return experience

    def _key(self, iteration: int) -> tuple[int, ...]:
        """Integers that name an iteration's collection in this process, and its random streams."""
        return (TRAIN, self.seed, iteration, self.global_rank)

    def _experience(self, key: tuple[int, ...]) -> Experience:
        """The attempts that began under a key, scored, with the credit of their turns."""
        collected = self.collector.finish(key)
        # one advantage per turn of each trajectory, (G, K); each sampled token gets its turn's
        credit = tuple(assign_credit(group, self.estimator) for group in collected.groups)
        return Experience(collected, credit)

    def iterate(
        self,
        questions: Sequence[Question],
        iteration: int,
        ahead: Sequence[Sequence[Question]] = (),
    ) -> Iterator[Step]:
        """One iteration: collect experience, then yield the steps that learn from it."""
        with self.policy.uneven_passes():
            self.experience = self.collect(questions, iteration, ahead)
        self._unlogged = self.experience
        self._began = time.perf_counter()
        torch.manual_seed(self.stream(iteration))  # dropout draws from it, so resuming is exact
        return self._steps_of(self.experience, iteration)

    @property
    def last_trajectory(self) -> Trajectory | None:
        """A trajectory of the last iteration."""
        return None if self.experience is None else self.experience.trajectories[0]

    def _steps_of(self, experience: Experience, iteration: int) -> Iterator[Step]:
        """The optimiser steps that learn from an iteration's experience."""
        tokens = TokenColumns(experience.trajectories, experience.advantages, experience.returns)
        settings, policy = self.learning_settings, self.policy
        shuffle = torch.Generator().manual_seed(self.stream(iteration))

        def read(trajectories: Sequence[Trajectory]) -> list[Tensor]:
            return [
                scores.logprobs for scores in score_trajectories(trajectories, self.score_tokens)
            ]

        def forward_passes(
            rows: Sequence[TokenRow], owners: Sequence[int]
        ) -> Iterator[ForwardPass]:
            return policy.forward_passes(rows, owners=owners)

        old = OldLogprobs(tokens, read, settings, policy.uneven_passes)
        mean = self._mean_over_processes
        return iteration_steps(tokens, old, self.objective, settings, forward_passes, shuffle, mean)

    @property
    def learning_settings(self) -> LearningSettings:
        """The steps of an iteration, and the log-probabilities that their ratios are taken to."""
        lora = self.policy.lora
        return LearningSettings(
            passes=self.passes_per_iteration,
            steps_per_pass=self.steps_per_pass,
            dropout=lora is not None and lora.dropout > 0,
            needs=self.objective.needs,
            sampler_differs=self.max_staleness > 0,
        )

    def _mean_over_processes(self, value: Tensor) -> Tensor:
        """The mean of a tensor over processes; without a Trainer there is only one process."""
        if self._trainer is None:
            return value
        strategy = self.trainer.strategy
        return cast(Tensor, strategy.reduce(value.to(self.device), reduce_op="mean"))

    def stream(self, iteration: int) -> int:
        """The random stream of an iteration in this process."""
        return stream_seed(*self._key(iteration)) % 2**63

    def count_steps(self, questions: int) -> int:
        """The number of optimiser steps in an iteration.

        Args:
            questions: Number of questions that this process asks in the iteration.
        Raises:
            RecipeError: If there are more steps than trajectories.
        """
        trajectories = questions * self.group_size
        if trajectories < self.steps_per_pass:
            raise RecipeError(
                f"model.steps_per_pass is {self.steps_per_pass}, but there are only "
                f"{questions} questions x {self.group_size} = {trajectories} trajectories per "
                "process. Lower it."
            )
        return self.passes_per_iteration * self.steps_per_pass

    # ----------------------------------------------------------------- learn

    def on_train_batch_start(self, batch: Step, batch_idx: int) -> None:
        """Log the collection's metrics, once per iteration."""
        if (experience := self._unlogged) is not None:
            self._unlogged = None
            tallies = experience.tallies(self.rewards)
            charged, processes = self.estimator.charges_costs, self.trainer.world_size
            earned = tally_earnings(experience.first_draw.groups, charged, processes)
            self.metrics.log(tallies | earned)
            if self.max_staleness:
                self.metrics.log({"train/staleness": experience.staleness(self.global_step)})
        else:  # the first step's time began in `iterate`, and includes the old log-probabilities
            self._began = time.perf_counter()

    def on_train_batch_end(self, outputs: object, batch: Step, batch_idx: int) -> None:
        """Log the step's time, and the peak memory so far."""
        seconds = (time.perf_counter() - self._began) / self.trainer.world_size
        self.metrics.log_sum("train/seconds", seconds)
        self.metrics.log({"train/memory_gb": Tally(peak_bytes(self.device) / 1e9, 1)})

    def training_step(self, batch: Step, batch_idx: int) -> Tensor:
        """One optimiser step. The backward passes of all minibatches but the last run here and add
        up their gradients. Lightning runs the last one, and then processes average the sum."""
        for parameter in self.policy.parameters():
            parameter.grad = None
        wait: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if isinstance(strategy := self.trainer.strategy, ParallelStrategy):
            wait = strategy.block_backward_sync()
        parts: list[dict[str, Tensor]] = []  # sums of each minibatch, on the device for now
        with wait:
            for _ in range(self._idle_forward_passes(batch)):
                self.loss(batch[0].weightless())[0].backward()
            for minibatch in batch[:-1]:
                loss, sums = self.loss(minibatch)
                loss.backward()
                parts.append(sums)
        loss, sums = self.loss(batch[-1])
        watched = _totals([*parts, sums])
        loss_alone = {"train/loss": Tally(watched.pop("loss"), 1)}
        tokens = sum(map(len, batch))
        self.metrics.log(loss_alone | {f"train/{k}": Tally(v, tokens) for k, v in watched.items()})
        return loss

    def _idle_forward_passes(self, batch: Step) -> int:
        """Number of forward passes that this process makes only because another has more
        minibatches: each forward pass of a divided policy takes all processes."""
        if not self.policy.is_sharded:
            return 0
        own = torch.tensor(len(batch), device=self.device)
        largest = self.trainer.strategy.reduce(own, reduce_op="max")
        return int(cast(Tensor, largest)) - len(batch)

    def loss(self, batch: Minibatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of one minibatch: the objective's, and the value loss of a critic.

        Returns:
            The loss; and sums over the tokens, in float64 and without a gradient, by the names of
            their metrics.
        """
        logprobs, entropy, values = self.policy(batch.layout, self.rollout.temperature)
        reference = None
        if "reference" in self.objective.needs:
            with self.policy.reference(), torch.no_grad():
                reference = self.policy(batch.layout, self.rollout.temperature).logprobs
        tokens = batch.tokens(logprobs, entropy, reference, self.objective.needs)
        loss, sums = compute_loss(self.objective, tokens)
        if batch.returns is not None:
            value_losses = (batch.returns - values).square() / 2
            loss = loss + self.objective.value_coef * (value_losses * batch.weights).sum()
            sums["value_loss"] = value_losses.detach().sum()
        if not loss.isfinite():
            raise self._training_error(f"the loss is {float(loss.detach())}")
        sums |= {"loss": loss.detach(), "entropy": entropy.sum()}
        if batch.first_step:
            sums["logprob_gap"] = (logprobs.detach() - batch.sampler_logprobs).abs().sum()
        if batch.keep is not None:
            batch.keep(logprobs)
        return loss, {name: value.detach().double() for name, value in sums.items()}

    # -------------------------------------------------------------- evaluate

    def evaluate(
        self,
        trainer: L.Trainer,
        data: L.LightningDataModule,
        samples: int | None = None,
        checkpoint: str | Path | None = None,
    ) -> list[Group]:
        """Score questions as a run's validations do.

        Args:
            trainer: Runs the evaluation, over all its processes.
            data: The questions.
            samples: Trajectories to sample per question; None for a single greedy one.
            checkpoint: The checkpoint to score; None for the weights as they are.
        Returns:
            The scored groups of this process. With rank r of R processes, group i of them is
            number r + i R.
        """
        self._samples = samples
        # a checkpoint may come from anywhere, so no code in it is run
        options = {"ckpt_path": checkpoint, "verbose": False, "weights_only": True}
        try:
            with read_safely(checkpoint):
                trainer.validate(self, datamodule=data, **options)  # type: ignore[arg-type]
        finally:
            self._samples = None
        return self._evaluated

    def on_validation_epoch_start(self) -> None:
        """Forget the groups of the last evaluation."""
        self._evaluated = []
        # here, because a process without a question has to take part too
        if self.policy.is_sharded:
            self.collector.sync()

    def validation_step(  # type: ignore[override] # Lightning passes on whatever it returns
        self, batch: list[Question], batch_idx: int
    ) -> Evaluated:
        """Score trajectories, by default one greedy trajectory per question. A process may have no
        question in a batch. Lightning hands the result to the callbacks."""
        split = self.split
        with self.policy.uneven_passes():
            groups = self._score_attempts(batch, batch_idx) if batch else ()
        self._evaluated += groups
        tallies = scoring.tally_groups(groups, self.rewards)
        self.metrics.log({f"{split}/{name}": t for name, t in tallies.items()}, weigh=True)
        if self.trainer.state.fn != "fit":
            self.metrics.log_sum(f"{split}/questions", len(batch))
        return Evaluated(groups, greedy=self._samples is None)

    @property
    def split(self) -> str:
        """The name of what an evaluation scores: `val`, `test`, ..."""
        data = get_data_module(self.trainer)
        return data.label or data.split if isinstance(data, IterationData) else "val"

    def _score_attempts(self, batch: list[Question], number: int) -> tuple[Group, ...]:
        key = (EVALUATE, self.seed, number, self.global_rank)
        attempts = self.collector.explore(batch, self._samples, key, self.bar("evaluating"))
        return self.collector.score(attempts.trajectories)


def _totals(parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """The sums of several minibatches, which have the same names, with one transfer from the
    device."""
    total = reduce(torch.add, [torch.stack([part[name] for name in parts[0]]) for part in parts])
    return dict(zip(parts[0], total.tolist(), strict=True))
