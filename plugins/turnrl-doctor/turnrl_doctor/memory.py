"""The plan, applied to a recipe: `MemoryPlan` fills in what the recipe leaves to `profile`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch.utilities import rank_zero_only

from turnrl import MTGRPO, Check, Finding, RecipeError, Start, parse_bytes
from turnrl_doctor.counts import CONTEXT
from turnrl_doctor.plan import CostedChoice, choose, gigabytes
from turnrl_doctor.speed import Card, card_of
from turnrl_doctor.table import table
from turnrl_doctor.work import Work, decoder_of
from turnrl_slots import Slots

ENGINE_SETTINGS = ("slots", "prefill_tokens", "kv_memory", "decode_weights", "keep_memory")
"""The settings of Slots that the plan chooses; it knows the memory of no other engine."""


def card_for(device: torch.device, profile: str) -> Card | None:
    """The card to plan for: a card of the size in `profile`, or the present GPU; None if the run
    has no GPU.

    Raises:
        RecipeError: If `profile` is neither `auto` nor a size.
    """
    if profile != "auto":
        return card_of(profile, parse_bytes(profile, "plan.profile"))
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    free, _ = torch.cuda.mem_get_info(device)
    # a context is there by now; the plan counts it as its own
    reserved = torch.cuda.memory_reserved(device)
    size = min(properties.total_memory, free + reserved + CONTEXT)
    return card_of(properties.name, size)


def work_of(start: Start) -> Work:
    """A recipe's part of the plan, without its weights.

    Raises:
        LookupError: If the plan does not know the recipe's kind.
        RecipeError: If the model's configuration cannot be loaded.
    """
    module = start.module
    if not isinstance(module, MTGRPO):
        raise LookupError(f"{type(module).__name__} is not MTGRPO")
    policy, rollout, estimator = module.policy, module.rollout, module.estimator
    lora, turns = policy.lora, rollout.max_turns
    trajectories = -(-start.questions // start.processes) * module.group_size
    half = policy.files.dtype_on("cuda") == torch.bfloat16
    targets = None
    if lora is not None and lora.target_modules != "all-linear":
        modules = lora.target_modules
        targets = (modules,) if isinstance(modules, str) else tuple(modules)
    return Work(
        shape=decoder_of(policy.config),
        four_bit=policy.settings.quantization == "nf4",
        # without an adapter weights are always float32, and activations are planned as float32,
        # which is more than mixed precision takes
        size=2 if half and lora is not None else 4,
        rank=0 if lora is None else lora.r,
        targets=targets,
        trajectories=trajectories * (1 + estimator.probes * turns),
        max_tokens=rollout.max_tokens,
        turn_tokens=rollout.max_turn_tokens,
        turns=turns,
        result_tokens=min(rollout.max_result_tokens, rollout.max_tokens),
        passes=module.passes_per_iteration,
        old=module.learning_settings.reads_beforehand,
        cut=rollout.sampling.cuts_distribution,
        moments=_moments(module),
        processes=start.processes,
        shares=start.processes if start.divided else 1,
        mixed=half and lora is None,
        sampled=isinstance(module.engine_settings, Slots),
    )


def _moments(module: MTGRPO) -> float:
    """Numbers in float32 that the recipe's optimiser keeps per weight, tried on a small matrix."""
    weights = torch.nn.Parameter(torch.zeros(64, 64))
    weights.grad = torch.zeros_like(weights)
    try:
        optimizer = module.optimizer([weights])
        optimizer.step()
        state = [t for t in optimizer.state[weights].values() if isinstance(t, torch.Tensor)]
    except Exception:  # of any library; a run will report it. Adam keeps the usual two
        return 2.0
    return round(sum(t.numel() * t.element_size() for t in state) / (weights.numel() * 4), 2)


def _owners(module: MTGRPO, sampled: bool) -> dict[str, object]:
    """The owner of each setting. An engine that the plan does not know owns none."""
    engine = dict.fromkeys(ENGINE_SETTINGS, module.engine_settings) if sampled else {}
    policy = module.policy.settings
    return {"minibatch_tokens": policy, "gradient_checkpointing": policy, **engine}


def given_settings(module: MTGRPO, work: Work) -> dict[str, object]:
    """The settings that the recipe gives, in the units of the plan's `Choice`."""
    settings, layers = dict[str, object](), work.shape.layers
    for name, owner in _owners(module, work.sampled).items():
        value = getattr(owner, name, False)
        if name == "gradient_checkpointing" and value is None and module.policy.network is not None:
            value = False  # loading has made that choice
        if value is None or value == "auto":
            continue
        if name == "kv_memory":
            value = parse_bytes(str(value), "model.engine.kv_memory")
        elif name == "gradient_checkpointing":
            value = layers if value is True else min(int(value), layers)
        settings[name] = value
    return settings


def apply(plan: CostedChoice, module: MTGRPO) -> None:
    """Set the settings that the recipe leaves open, and note the plan."""
    module.memory.plan = plan
    for_engine, for_policy = dict[str, Any](), dict[str, Any]()
    for name in _owners(module, plan.work.sampled):
        value = getattr(plan.choice, name)
        if name == "gradient_checkpointing":
            value = {0: False, plan.work.shape.layers: True}.get(value, value)
        elif name == "kv_memory":
            value = f"{value // 1000}KB"
        if name in plan.given:
            continue
        (for_engine if name in ENGINE_SETTINGS else for_policy)[name] = value
    if for_engine:
        module.use_engine(replace(cast(Slots, module.engine_settings), **for_engine))
    if for_policy and module.policy.network is None:
        module.use_policy(replace(module.policy.settings, **for_policy))
    for phase in ("sampling", "learning"):
        if phase == "learning" or plan.work.sampled:
            module.memory.planned[phase] = plan.total(phase), plan.setting(phase)


class MemoryPlan(Check):
    """The memory of a GPU, planned before weights are loaded."""

    def __init__(self) -> None:
        self._plan: CostedChoice | None = None
        self._why = "the run has no GPU, and plan.profile gives no size"

    def settle(self, start: Start) -> None:
        """Choose the settings that the recipe leaves to `profile`, and print the plan. A policy
        that only acts gets the choices of a run on this card; on a CPU, or if no run fits, it gets
        none.

        Raises:
            RecipeError: If a run would learn, and nothing fits the card.
        """
        module = start.module
        if not isinstance(module, MTGRPO):
            return
        if (plan := module.memory.plan) is None:
            plan = self._planned(start, module)
        if not isinstance(plan, CostedChoice):
            return
        self._plan = plan
        if start.learns and not module.memory.plan_shown:
            module.memory.plan_shown = True
            rank_zero_only(print)(table(plan), flush=True)

    def _planned(self, start: Start, module: MTGRPO) -> CostedChoice | None:
        """Make a plan and apply it to a module that has none; None if no plan can be made."""
        if start.profile is None:
            self._why = "plan.profile is null"
            return None
        if not start.learns and start.device.type == "cpu":
            return None  # it may have trained elsewhere, and pages for a GPU may not fit here
        if (card := card_for(start.device, start.profile)) is None:
            return None
        try:
            work = work_of(start)
        except LookupError as error:
            self._why = str(error)
            return None
        beside = module.engine.beside(card.bytes)
        if beside is not None and module.max_staleness:  # it samples while the policy learns
            beside = beside._replace(learning=beside.sampling)
        work = replace(work, beside=beside)
        try:
            plan = choose(work, card, given_settings(module, work))
        except RecipeError:
            if start.learns:
                raise
            return None
        apply(plan, module)
        return plan

    def run(self, start: Start) -> Iterable[Finding]:
        """One line: the phase that needs most, or the reason why there is no plan."""
        if start.module is None:
            return
        if self._plan is None:
            if start.device.type == "cuda":
                step = "Set model.policy.minibatch_tokens and model.engine.kv_memory by hand."
                yield Finding("warn", "memory plan", f"none: {self._why}", step)
            else:
                yield Finding(
                    "pass", "memory plan", f"none: {self._why}. --card 24GB plans for one"
                )
            return
        plan = self._plan
        if not plan.work.sampled and plan.work.beside is None:
            engine = cast(MTGRPO, start.module).engine.name
            text = f"the plan does not know what {engine} takes while it samples"
            yield Finding("warn", "memory plan", text, "Leave room for it: lower plan.profile.")
        usable = f"{gigabytes(plan.most)} of {gigabytes(plan.card.bytes)} GB"
        yield Finding("pass", "memory plan", f"{plan.worst} needs most, {usable}")
