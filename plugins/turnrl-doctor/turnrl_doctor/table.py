"""A plan as lines to print."""

from __future__ import annotations

from turnrl_doctor.counts import PHASES
from turnrl_doctor.plan import CostedChoice, gigabytes
from turnrl_doctor.work import NAMES


def table(plan: CostedChoice) -> str:
    """The plan as lines of at most 80 columns."""
    card, choice = plan.card, plan.choice
    lines = [
        f"memory plan for {card.name[:60]}",
        f"  {gigabytes(card.bytes)} GB, of which the plan uses {gigabytes(card.usable)}; in GB",
        f" {'':24}" + "".join(f"{phase:>11}" for phase in PHASES),
    ]
    parts = dict.fromkeys(name for phase in PHASES for name in plan.memory[phase])
    for name in parts:
        sizes = [plan.memory[phase].get(name, 0) for phase in PHASES]
        if any(size >= 5e6 for size in sizes):
            shown = (gigabytes(size) if size >= 5e6 else "-" for size in sizes)
            lines.append(f" {name:24}" + "".join(f"{text:>11}" for text in shown))
    totals = "".join(f"{gigabytes(plan.total(phase)):>11}" for phase in PHASES)
    lines.append(f" {'sum':24}{totals}")
    lines.append("  settings")
    for name in NAMES:
        if not plan.work.sampled and name not in ("minibatch_tokens", "gradient_checkpointing"):
            continue
        value = getattr(choice, name)
        text = f"{gigabytes(value)}GB" if name == "kv_memory" else str(value)
        if name == "gradient_checkpointing":
            text = f"{value} of {plan.work.shape.layers} layers"
        lines.append(f"    {name:24}{text:24}{'given' if name in plan.given else 'by the plan'}")
    return "\n".join(lines)
