"""Check of an objective."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from turnrl.plugin.errors import PluginError
from turnrl.testing.contract import reporting_breaches, require
from turnrl.types.objective import Need, Objective, SampledTokens

if TYPE_CHECKING:
    from torch import Tensor


def check_objective(objective: Objective) -> None:
    """Check an objective on drawn tokens: that its loss is a finite number with a gradient for the
    policy, that a step's loss is the sum over its minibatches, that it reads only what it says it
    needs, and changes nothing.

    It does not check that the loss is a good one.

    Args:
        objective: The objective.
    Raises:
        AssertionError: If a rule is broken, with the rule and the input.
    """
    import torch

    from turnrl.objectives.applying import check_needs

    name = type(objective).__name__
    try:
        check_needs(objective)
    except PluginError as error:
        raise AssertionError(str(error)) from error
    draw = random.Random(0)
    for counts in ([1], [3, 1], [2, 5, 4]):
        numbers = torch.tensor(counts)
        weights = objective.token_weights(numbers, float(sum(counts)), float(len(counts)))
        with reporting_breaches(f"{name}.token_weights for {counts} tokens"):
            fits = tuple(weights.shape) == (len(counts),) and bool(weights.isfinite().all())
            require(fits, f"gives {weights!r}, not a finite number for each trajectory")
        tokens = _draw_tokens(draw, counts, weights, objective.needs)
        with reporting_breaches(f"{name}.loss of trajectories with {counts} tokens"):
            loss, sums, gradient = _loss(objective, tokens)
            apart = [_loss(objective, part) for part in _minibatches(tokens, len(counts))]
            total = sum(part[0] for part in apart)
            close = abs(float(total - loss)) <= 1e-4 * max(1.0, abs(float(loss)))
            rule = "not the sum over minibatches of a trajectory each. Multiply by the weights, and"
            require(close, f"gives {float(loss)}, {rule} sum: minibatches are {float(total)}")
            joined = torch.cat([part[2] for part in apart])
            require(gradient.allclose(joined, atol=1e-5), "gradients differ between minibatches")
            names = [set(part[1]) for part in apart]
            require(all(own == set(sums) for own in names), f"gives metrics {names}: not the same")


def _loss(objective: Objective, tokens: SampledTokens) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The loss, its metrics, and its gradient by the policy's log-probabilities."""
    import torch

    from turnrl.objectives.applying import compute_loss

    before = {f.name: getattr(tokens, f.name) for f in fields(tokens)}
    before = {k: v.detach().clone() for k, v in before.items() if isinstance(v, torch.Tensor)}
    logprobs = tokens.logprobs.detach().clone().requires_grad_()
    try:
        loss, sums = compute_loss(objective, replace(tokens, logprobs=logprobs))
    except PluginError as error:
        raise AssertionError(str(error)) from error
    for key, value in before.items():
        require(value.equal(getattr(tokens, key).detach()), f"changes {key} of the tokens")
    require(bool(loss.isfinite()), f"gives {loss.item()}, which is not finite")
    require(loss.requires_grad, "gives a loss without a gradient for the policy")
    (gradient,) = torch.autograd.grad(loss, logprobs)
    require(bool(gradient.isfinite().all()), f"has the gradient {gradient.tolist()}")
    return loss.detach(), sums, gradient


def _draw_tokens(
    draw: random.Random, counts: Sequence[int], weights: Tensor, needs: frozenset[Need]
) -> SampledTokens:
    """Tokens of trajectories, with the log-probabilities that an objective needs."""
    import torch

    total = sum(counts)

    def stream(low: float, high: float) -> Tensor:
        return torch.tensor([draw.uniform(low, high) for _ in range(total)])

    numbers = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    logprobs = stream(-4, -0.1)
    return SampledTokens(
        logprobs=logprobs,
        advantages=stream(-2, 2),
        weights=weights.repeat_interleave(torch.tensor(counts)),
        entropies=stream(0, 3),
        trajectories=numbers,
        turns=2 * numbers,
        compared={need: logprobs + stream(-1, 1) for need in sorted(needs)},
    )


def _minibatches(tokens: SampledTokens, count: int) -> list[SampledTokens]:
    """The tokens of each trajectory."""
    parts = []
    for number in range(count):
        own = tokens.trajectories == number
        streams = {
            f.name: value[own]
            for f in fields(tokens)
            if (value := getattr(tokens, f.name)) is not None and f.name != "compared"
        }
        compared = {need: stream[own] for need, stream in tokens.compared.items()}
        parts.append(replace(tokens, **streams, compared=compared))
    return parts
