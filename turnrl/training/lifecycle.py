"""The life of a module around a policy: set up, loaded, optimised, saved and closed by Lightning.

The algorithm, which collects, gives credit and learns, is in `module.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from turnrl.agent.chat import ChatFormat
from turnrl.agent.rollout import Rollout
from turnrl.plugin.errors import (
    CheckpointError,
    RecipeError,
    TrainingError,
    blaming,
    describe_value,
)
from turnrl.plugin.signals import end_with_parent
from turnrl.policy.memory import Memory
from turnrl.policy.model import LanguageModel
from turnrl.policy.scoring import score_trajectories
from turnrl.policy.settings import Policy
from turnrl.policy.sharding import FSDP2, local_part
from turnrl.policy.trials import try_learning
from turnrl.rewards.scoring import Tally
from turnrl.runs.checkpoints import Position, read_position
from turnrl.training import checkpoints
from turnrl.training.asking import ask, check_sampling, scores
from turnrl.training.callbacks import callbacks_of_a_run
from turnrl.training.checks import check_division, examine_run, make_start
from turnrl.training.collection import Collector, KnownQuestions
from turnrl.training.learning import Step
from turnrl.training.trainer_checks import check_trainer, claim_folder
from turnrl.types import (
    EngineSettings,
    Question,
    RunContext,
    TokenRow,
    TokenScores,
    Trajectory,
)
from turnrl.types.streams import ASK
from turnrl.watch.metrics import MetricLog
from turnrl.watch.trainer import announce, get_data_module, run_folder


class PolicyModule(L.LightningModule, ABC):
    """Whatever a run does beside the algorithm, which `MTGRPO` adds: its recipe is checked, the
    policy's weights are loaded, stepped, saved and restored, and it answers questions of your own.

    Args:
        policy: The policy.
        rollout: How it acts.
        engine: Settings of the engine that samples the policy.
        optimizer: Makes the optimiser of the trained parameters.
        scheduler: Makes its learning-rate schedule; None for a constant rate.
        seed: Seed of sampling and of the order of trajectories.
    Attributes:
        max_staleness: Number of iterations that are sampled ahead of the one being learned from.
        gpu_memory: The memory that is planned for, a size or `auto`; None for no plan.
    """

    max_staleness: int = 0
    gpu_memory: str | None = None

    def __init__(
        self,
        policy: LanguageModel,
        rollout: Rollout,
        engine: EngineSettings,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        scheduler: Callable[[Optimizer], LRScheduler] | None,
        seed: int,
    ) -> None:
        super().__init__()
        end_with_parent()  # a script of one's own starts the others, too
        self.policy = policy
        self.rollout = rollout
        self.use_engine(engine)
        self.optimizer = optimizer
        self.scheduler = scheduler
        self.seed = seed
        self.memory = Memory()
        self.metrics = MetricLog(self)
        self.folder: Path | None = None
        """The run's folder, once the module is set up."""
        self._loaded = Position(0, 0)

    def use_engine(self, settings: EngineSettings) -> None:
        """Sample with an engine of these settings. The one before must not be started."""
        self.engine_settings = settings
        self.engine = settings.build()

    def use_settings(
        self,
        policy: Policy,
        engine: EngineSettings,
        planned: Mapping[str, tuple[int, str]],
    ) -> None:
        """Build the policy and the engine from the settings of a memory plan. A policy whose
        weights are loaded stays as it is.

        Args:
            policy: The policy's settings.
            engine: The engine's settings.
            planned: For each phase in the plan, its bytes and the setting that lowers them.
        """
        if self.policy.network is None and policy != self.policy.settings:
            self.policy = policy.build(self.policy.critic)
        if engine != self.engine_settings:
            self.use_engine(engine)
        self.memory = Memory(planned)

    @property
    @abstractmethod
    def collector(self) -> Collector:
        """Lets the policy act, and scores its attempts."""

    @abstractmethod
    def count_steps(self, questions: int) -> int:
        """Optimiser steps of an iteration in which a process asks this many questions."""

    @abstractmethod
    def iterate(
        self,
        questions: Sequence[Question],
        iteration: int,
        ahead: Sequence[Sequence[Question]] = (),
    ) -> Iterator[Step]:
        """One iteration: collect experience, then yield the steps to learn from it.

        Args:
            questions: The questions of this process.
            iteration: The iteration's number.
            ahead: Its questions of the next `max_staleness` iterations, or of as many as are left.
        """

    @property
    @abstractmethod
    def last_trajectory(self) -> Trajectory | None:
        """A trajectory to read before each checkpoint, because a policy that can no longer act is
        not saved. None if nothing was sampled yet."""

    @property
    def surroundings(self) -> RunContext:
        """The run's folder and processes. The processes share the capacity of its tools."""
        if self._trainer is None:
            return RunContext(self.folder)
        divided = isinstance(self._trainer.strategy, FSDP2)
        return RunContext(self.folder, self._trainer.world_size, divided)

    @property
    def chat(self) -> ChatFormat:
        """The policy's chat format."""
        return self.collector.chat

    def configure_callbacks(self) -> list[L.Callback]:
        """Callbacks that belong to every run of this module. Before any other callback acts, refuse
        a trainer that would change what is learned."""
        check_trainer(self.trainer)
        return callbacks_of_a_run(self.trainer)

    def setup(self, stage: str) -> None:
        """Find a recipe's mistakes before any weights are loaded."""
        if self.surroundings.divided:
            check_division(self.policy, self.engine)
        self.collector.close()  # `ask` may have begun with other settings, on another device
        self.folder = run_folder(self.trainer)
        if self.folder is not None:  # from here on it has to be there
            self.folder.mkdir(parents=True, exist_ok=True)
        data, learns = get_data_module(self.trainer), stage == "fit"
        start = make_start(self.trainer, self, data, self.folder, self.gpu_memory, learns)
        if learns:
            examine_run(start, shown=self.trainer.is_global_zero)
        else:
            claim_folder(self.trainer, self.folder, self.trainer.ckpt_path)
            start.settle()  # an evaluation samples like the run's own validation
        self.collector.check(learns=start.learns)
        if isinstance(data, KnownQuestions):
            self.collector.check_data(data)

    def configure_model(self) -> None:
        """Load the weights onto the device that the strategy chose."""
        run = self._trainer
        announce(run, f"loading {self.policy.settings.model}")
        with self.memory.phase("loading"):
            strategy = None if run is None else run.strategy
            mesh = strategy.mesh if isinstance(strategy, FSDP2) else None
            self.policy.load(self.device if strategy is None else strategy.root_device, mesh)

    def on_fit_start(self) -> None:
        """Refuse to write over another run; only now is it known whether this one resumes it. On a
        device other than a CPU, compute a full minibatch once, forward and back, so that a run that
        lacks memory fails in its first minutes."""
        if not self.trainer.strategy.restore_checkpoint_after_setup:
            claim_folder(self.trainer, self.folder, self.trainer.ckpt_path)
        if self.device.type != "cpu":
            with self.memory.phase("learning"):
                longest = self.rollout.max_tokens  # a minibatch holds at least one such trajectory
                try_learning(self.policy, max(self.policy.budget, longest), longest)

    def configure_optimizers(self) -> Any:
        """The recipe's optimiser of the trained parameters, and its schedule per optimiser step."""
        with blaming(RecipeError, "model.optimizer", "Fix its settings."):
            optimizer = self.optimizer(self.policy.parameter_groups())
        with blaming(RecipeError, "model.scheduler", "Fix its settings."):
            schedule = self.scheduler(optimizer) if self.scheduler is not None else None
        waits = isinstance(schedule, ReduceLROnPlateau)  # for a metric
        if self.scheduler is not None and (waits or not isinstance(schedule, LRScheduler)):
            raise RecipeError(
                f"model.scheduler makes {describe_value(schedule)}. Give a class or a function "
                "that makes a schedule that counts steps: "
                "scheduler=lambda optimizer: CosineAnnealingLR(optimizer, T_max=100)."
            )
        if not isinstance(optimizer, Optimizer):
            raise RecipeError(
                f"model.optimizer makes {describe_value(optimizer)}. Give a class or a function "
                "that makes an optimiser: optimizer=lambda parameters: AdamW(parameters, lr=1e-5)."
            )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}] if schedule else []

    def score_tokens(
        self, rows: Sequence[TokenRow], temperature: float | None = None
    ) -> list[TokenScores]:
        """The current learner's scores of sampled tokens; see `LanguageModel.score_tokens`."""
        with self.memory.phase("learning"):
            return self.policy.score_tokens(
                rows, temperature=temperature or self.rollout.temperature
            )

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Lightning's step, in which it calls `training_step` and its backward pass too."""
        with self.memory.phase("learning"):
            super().optimizer_step(*args, **kwargs)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Nothing: `training_step` already begins with it, and Lightning calls this afterwards."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Stop before a step that would ruin the weights."""
        gradients = [p.grad for p in self.policy.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not norm.isfinite():
            raise self._training_error(f"the gradient's norm is {float(norm)}")
        self.metrics.log({"train/grad_norm": Tally(float(norm), 1)})

    def _training_error(self, fault: str) -> TrainingError:
        iteration, step = self.position
        return TrainingError(
            f"{fault} at step {step} (iteration {iteration}). Lower the learning rate "
            "(model.optimizer.lr) or trainer.gradient_clip_val, and resume from an earlier "
            "checkpoint."
        )

    def on_train_end(self) -> None:
        """Keep the position of these weights for a later evaluation."""
        self._loaded = self.position

    def teardown(self, stage: str) -> None:
        """Close the engine."""
        self.collector.close()

    def on_save_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Keep only the trained weights and the policy's identity. Refuse to save a policy that can
        no longer act: a step may leave weights finite but ruined, so that the next forward pass is
        not finite."""
        if self.last_trajectory is not None:
            (read,) = score_trajectories([self.last_trajectory], self.score_tokens)
            named = {"the policy's log-probabilities": read.logprobs, "its values": read.values}
            for name, numbers in named.items():
                if not numbers.isfinite().all():
                    raise self._training_error(f"{name} are not finite")
        checkpoints.add_identity(checkpoint, self.policy, self.trainer.optimizers)

    def on_load_checkpoint(self, checkpoint: dict[str, object]) -> None:
        """Refuse a checkpoint of another policy, and let the recipe's optimiser settings override
        the saved ones.

        Raises:
            CheckpointError: Naming the difference.
        """
        fit = self._trainer is not None and self.trainer.state.fn == "fit"
        checkpoints.check_policy(checkpoint, self.policy, learns=fit)
        self._loaded = read_position(checkpoint)
        if fit and "optimizer_states" in checkpoint:  # otherwise Lightning reports what it lacks
            (optimizer,), schedules = self.configure_optimizers()
            schedule = schedules[0]["scheduler"] if schedules else None
            checkpoints.override_optimizer(checkpoint, optimizer, schedule)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load the trained weights, the only ones in a checkpoint. The policy is loaded first if it
        is not yet.

        Args:
            state_dict: The `state_dict` of a checkpoint, or of this module.
            strict: Refuse missing and unknown names.
            assign: As in torch.
        Raises:
            CheckpointError: Naming a trained weight that is missing, or a name that is unknown.
        """
        if self.policy.network is None:
            self.configure_model()
        self.collector.forget()
        parameters = dict(self.named_parameters())
        own = {
            name: local_part(value, parameters[name])
            if isinstance(value, Tensor) and name in parameters
            else value
            for name, value in state_dict.items()
        }
        keys = super().load_state_dict(own, strict=False, assign=assign)
        trained = {f"policy.{name}" for name in self.policy.trainable_parameters()}
        missing = [name for name in keys.missing_keys if name in trained]
        # a policy that only acts needs no critic
        unknown = [name for name in keys.unexpected_keys if "value_head." not in name]
        if strict and (missing or unknown):
            kind = "lack" if missing else "hold the unknown"
            raise CheckpointError(
                f"the weights {kind} {(missing or unknown)[0]}. Give the state_dict of a "
                f"checkpoint of this policy, {self.policy.settings.model!r}."
            )
        return type(keys)(missing, unknown)

    @property
    def position(self) -> Position:
        """Where the policy stands."""
        if self._trainer is not None and self.trainer.state.fn == "fit":
            iteration = self.trainer.fit_loop.epoch_progress.current.ready
            return Position(iteration, self.global_step)
        return self._loaded

    def bar(self, text: str) -> str | None:
        """Text of a progress bar, if this process shows one."""
        run = self._trainer
        shown = run is None or (run.is_global_zero and run.progress_bar_callback is not None)
        return text if shown else None

    def ask(
        self,
        questions: str | Question | Sequence[str | Question],
        samples: int | None = None,
        seed: int = 0,
        temperature: float | None = None,
    ) -> list[Trajectory]:
        """Let the policy answer questions of your own. Needs no Trainer. After one, the policy acts
        on the Trainer's device.

        Args:
            questions: Texts, or questions with their accepted answers; or a single one.
            samples: Trajectories to sample for each question; None for one greedy trajectory, or
                for one sample if there is a temperature.
            seed: Seed of the samples.
            temperature: Sampling temperature; None for the rollout's, 0 for greedy.
        Returns:
            The trajectories, grouped by question; `print` shows the turns of one.
        Raises:
            TurnRLError: As in a run, about the recipe, a tool's world or a question.
        """
        check_sampling(samples, seed, temperature)
        if self._trainer is None:
            self.collector.check()
            self.configure_model()
            self.collector.forget()  # without a Trainer nothing counts the steps of the weights
        self._return()
        key, bar = (ASK, self.seed, seed), self.bar("asking")
        return ask(self.collector, questions, samples, temperature, key, bar)

    def scores(self, trajectories: Sequence[Trajectory]) -> list[dict[str, float]]:
        """The scores of each trajectory, of one question or of several.

        Args:
            trajectories: From `ask`, of questions with accepted answers.
        Returns:
            The four curves and the rewards, by their names in `metrics.csv`, such as
            `exact_match`, `reward/turn/tool_executed` and `reward/total`.
        Raises:
            DataError: If a question has no accepted answer, for example because it was asked as a
                text.
            PluginError: If a reward raises, or returns something that is not a finite number.
        """
        self._return()
        return scores(self.collector, trajectories)

    def _return(self) -> None:
        """Move back to the Trainer's device: a Trainer moves weights to the CPU when it ends."""
        if self._trainer is None or self.policy.network is None:
            return
        if self.device != (device := self._trainer.strategy.root_device):
            self.to(device)
