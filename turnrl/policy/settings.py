"""The settings of a policy. Nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from turnrl.plugin.errors import (
    ArgumentTypeError,
    RecipeError,
    check_at_least,
    check_instance,
    check_numbers,
    check_one_of,
    check_within,
    describe_value,
)
from turnrl.policy.sizes import MINIBATCH_TOKENS

if TYPE_CHECKING:
    from turnrl.policy.model import LanguageModel
    from turnrl.types import Critic


@dataclass(frozen=True)
class Lora:
    """A low-rank adapter (arXiv 2106.09685), trained in place of the base's weights.

    Args:
        r: Rank.
        alpha: The update is scaled by alpha / r.
        dropout: Dropout of the adapter's input. Above 0 the learner differs from the sampler, so
            the noise shows in `train/logprob_gap`, and ratios carry it into the clip. The
            correction of `importance_cap` stays free of the noise, at the cost of one more forward
            pass over the trajectories.
        target_modules: Names of the linear layers to adapt; `all-linear` takes all but the head.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | list[str] = "all-linear"

    def __post_init__(self) -> None:
        check_at_least(1, "model.policy.lora.", self, "r", whole=True, optional=False)
        check_at_least(0, "model.policy.lora.", self, "alpha", optional=False)
        check_within(0, 1, "model.policy.lora.", self, "dropout")

    @property
    def shape(self) -> dict[str, int]:
        """The settings that its weights on disk must share."""
        return {"r": self.r, "alpha": self.alpha}


@final
@dataclass(frozen=True)
class Policy:
    """A causal language model to be trained.

    Args:
        model: A local folder, a hub name such as `Qwen/Qwen2.5-7B`, or `package://NAME/FOLDER` for
            a folder inside an installed package. The folder of an adapter stands for its base with
            this adapter. The adapter is trained further, and its initial weights are the reference;
            it needs a `lora` of its rank.
        quantization: `nf4` keeps the base's linear layers in 4-bit NormalFloat with double
            quantisation (QLoRA, arXiv 2305.14314); needs `lora`.
        lora: Train a low-rank adapter. Without it every weight is trained, which suits tiny models.
        dtype: Type of the base's weights and activations; `auto` is bfloat16 under LoRA on a GPU,
            float32 otherwise. The trained weights are always float32: an adapter, or, in bfloat16
            without one, all weights, which are then rounded for each product (mixed precision).
        gradient_checkpointing: Recompute activations in the backward pass, to save memory, in all
            layers or in the given number of layers. Null leaves it to the memory plan
            (`model.gpu_memory`), or recomputes none.
        chat_template: A file with a Jinja chat template, or the name of one that comes with turnrl
            (for example `qwen3`), in place of the tokenizer's own.
        revision: Branch, tag or commit of a hub model.
        share_prefixes: While learning, read a prefix that trajectories share, for example a group's
            prompt, once for all that are computed together. This changes only time and memory
            (except that `Lora.dropout` then drops the same part of the prefix for all of them). If
            the model's code does not allow it, each trajectory is read from its first token.
        fused_kernels: On a GPU, use the fused norms, rotations and activations of Liger, if
            `liger-kernel` is installed (`pip install '.[gpu]'` in a clone) and knows the
            architecture.
        minibatch_tokens: The most tokens computed at once while learning, but at least one
            trajectory; a shared prefix counts once. It only affects memory and time. Null leaves it
            to the memory plan, or takes 16,384.
    """

    model: str
    quantization: Literal["nf4", "none"] = "none"
    lora: Lora | None = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    gradient_checkpointing: bool | int | None = None
    chat_template: str | None = None
    revision: str | None = None
    share_prefixes: bool = True
    fused_kernels: bool = True
    minibatch_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            advice = "Give a text: the path of a folder, or a hub name such as 'Qwen/Qwen2.5-7B'."
            raise ArgumentTypeError(f"model.policy.model is {describe_value(self.model)}. {advice}")
        if self.lora is not None:
            check_instance(Lora, "lora", self.lora)
        if self.quantization == "nf4" and self.lora is None:
            raise RecipeError(
                "model.policy.quantization is 'nf4', whose weights cannot be trained. Add "
                "model.policy.lora (an empty mapping means its defaults), or set it to 'none'."
            )
        check_one_of(("nf4", "none"), "model.policy.", self, "quantization")
        check_one_of(("auto", "float32", "bfloat16"), "model.policy.", self, "dtype")
        if not isinstance(self.gradient_checkpointing, bool):
            check_numbers("model.policy.", self, "gradient_checkpointing", whole=True)
        check_at_least(1, "model.policy.", self, "minibatch_tokens", whole=True)

    @property
    def budget(self) -> int:
        """The most tokens computed at once while learning."""
        return self.minibatch_tokens or MINIBATCH_TOKENS

    def build(self, critic: Critic | None = None) -> LanguageModel:
        """The model, without its weights, which `LanguageModel.load` loads.

        Args:
            critic: If given, the model gets a value head.
        """
        from turnrl.policy.model import LanguageModel  # imports torch

        return LanguageModel(self, critic)
