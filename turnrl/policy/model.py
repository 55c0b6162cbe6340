"""The policy: a causal language model, whole or with LoRA on a 4-bit base, and its tokenizer.

A recipe describes a `Policy`, which costs nothing to make. The tokenizer loads first, so that a
mistake in the recipe shows within a second. The weights load when Lightning asks for them.

Everything that computes is a method of `Policy`, because torch gathers the parts of a divided
policy (`divided`) only in methods of the module that it has wrapped.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, final

import torch
import transformers
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from turnrl.errors import (
    ArgumentTypeError,
    RecipeError,
    at_least,
    check_numbers,
    instance_of,
    kind_of,
    one_of,
)
from turnrl.policy.adapter import (
    Lora,
    digest_of,
    exchanged,
    start_adapter,
    with_adapter,
)
from turnrl.policy.attention import no_mask, take_over
from turnrl.policy.compute import blocks_of, fuse, head_logits, recompute
from turnrl.policy.divided import (
    UnevenPasses,
    divide,
    part_of,
    whole,
    whole_state,
)
from turnrl.policy.files import (
    Origin,
    check_quantization,
    check_vocabulary,
    fingerprint,
    load_config,
    load_network,
    load_tokenizer,
    locate,
    origin_of,
    quantization_of,
    refuse_other_kind,
)
from turnrl.policy.head import ValueHead, chosen_logprobs
from turnrl.policy.layout import ForwardPass, Layout, forward_passes
from turnrl.policy.sizes import MINIBATCH_TOKENS, sizes_of
from turnrl.policy.trials import Way, check_head, choose_way
from turnrl.types import Attend, Critic, TokenRow, TokenScores


@final
class Policy(nn.Module):
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
            (`plan.profile`), or recomputes none.
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

    def __init__(
        self,
        model: str,
        quantization: Literal["nf4", "none"] = "none",
        lora: Lora | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        gradient_checkpointing: bool | int | None = None,
        chat_template: str | None = None,
        revision: str | None = None,
        share_prefixes: bool = True,
        fused_kernels: bool = True,
        minibatch_tokens: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, str):
            advice = "Give a text: the path of a folder, or a hub name such as 'Qwen/Qwen2.5-7B'."
            raise ArgumentTypeError(f"model.policy.model is {kind_of(model)}. {advice}")
        if lora is not None:
            instance_of(Lora, "lora", lora)
        if quantization == "nf4" and lora is None:
            raise RecipeError(
                "model.policy.quantization is 'nf4', whose weights cannot be trained. Add "
                "model.policy.lora (an empty mapping means its defaults), or set it to 'none'."
            )
        self.model = model
        self.quantization = quantization
        self.lora = lora
        self.dtype = dtype
        one_of(("nf4", "none"), "model.policy.", self, "quantization")
        one_of(("auto", "float32", "bfloat16"), "model.policy.", self, "dtype")
        self.gradient_checkpointing = gradient_checkpointing
        if not isinstance(gradient_checkpointing, bool):
            check_numbers("model.policy.", self, "gradient_checkpointing", whole=True)
        self.chat_template = chat_template
        self.revision = revision
        self.share_prefixes = share_prefixes
        self.fused_kernels = fused_kernels
        self.minibatch_tokens = minibatch_tokens
        at_least(1, "model.policy.", self, "minibatch_tokens", whole=True)
        self.way = Way(share_prefixes, False, "not tried out before it is loaded")
        """The way it reads token sequences, chosen when it is loaded."""
        self.in_force: dict[str, str] = {}
        """The choices made when it was loaded, for people to read."""
        self.critic: Critic | None = None
        """If set, the next loading adds a value head, which begins at zero."""
        self.value_head: ValueHead | None = None
        self.network: transformers.PreTrainedModel | None = None
        self._fingerprint = ""
        self._start: dict[nn.Parameter, Tensor] = {}
        self._attends = False
        self._mixed = False
        self._uneven: UnevenPasses | None = None

    @property
    def budget(self) -> int:
        """The most tokens computed at once while learning."""
        return self.minibatch_tokens or MINIBATCH_TOKENS

    @cached_property
    def origin(self) -> Origin:
        """The base, and the adapter on it that training begins with, if `model` is one.

        Raises:
            RecipeError: If there is no such folder, or the adapter is of another shape than `lora`.
        """
        return origin_of(self.model, self.revision, None if self.lora is None else self.lora.shape)

    @cached_property
    def folder(self) -> str:
        """Where transformers loads the base from: a folder or a hub name."""
        return locate(self.origin.model)

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """The model's tokenizer, with the recipe's chat template if it gives one.

        Raises:
            RecipeError: If it cannot be loaded.
        """
        return load_tokenizer(self.model, self.origin, self.chat_template)

    @cached_property
    def config(self) -> transformers.PretrainedConfig:
        """The model's configuration, with every dropout at 0.

        Raises:
            RecipeError: If it cannot be loaded.
        """
        return load_config(self.origin.model, self.origin.revision)

    @property
    def base_quantization(self) -> str | None:
        """The method by which the base's weights are quantised, on disk or by the recipe; None if
        they are not."""
        return quantization_of(self.config) if self.quantization == "none" else self.quantization

    def check(self, tokens: int) -> None:
        """Find what cannot work, before any weights are loaded.

        Args:
            tokens: The most tokens of a trajectory.
        Raises:
            RecipeError: If the model has too few positions, is quantised and to be trained whole,
                or has no embedding for a token of its tokenizer.
        """
        limit = sizes_of(self.config).positions
        if limit is not None and tokens > limit:
            raise RecipeError(
                f"model.rollout.max_tokens is {tokens}, and {self.model!r} has positions for "
                f"{limit} tokens (max_position_embeddings). Set it to {limit} or less."
            )
        check_quantization(self.config, self.model, self.quantization, self.lora is not None)
        check_vocabulary(self.tokenizer, self.config, self.model)

    def check_files(self) -> None:
        """Compare the names and the shapes of the weights on disk with the architecture, and the
        adapter with its layers, without reading any weights.

        Raises:
            RecipeError: Naming what does not fit.
        """
        if quantization_of(self.config) is not None:
            return  # only its own package, on its own device, knows its layers
        meta = torch.device("meta")
        network = load_network(self.origin, self.config, torch.float32, False, meta)
        if self.lora is not None:
            network = with_adapter(network, self.lora)
            if self.origin.adapter is not None:
                start_adapter(network, self.origin.adapter)

    def _divide(self, mesh: DeviceMesh) -> None:
        """Keep a part of each weight in each process of a mesh. From then on all processes make
        equally many forward passes: see `uneven_passes`.

        Args:
            mesh: The processes.
        Raises:
            RecipeError: If the network has no layers to divide.
        """
        if not (layers := blocks_of(self.base)):
            raise RecipeError(
                f"trainer.strategy is fsdp2, and {type(self.base).__name__} has no layers that "
                "transformers marks as such, which it divides. Take ddp."
            )
        began = {name: self._start.get(p) for name, p in self.trainable_parameters().items()}
        divide(self, layers, mesh, "next_logits", "both_logits")
        parameters = self.trainable_parameters()
        self._start = {
            parameters[name]: part_of(weights, parameters[name])
            for name, weights in began.items()
            if weights is not None
        }
        self._uneven = UnevenPasses(mesh, self._idle)

    @property
    def divided(self) -> bool:
        """True if this process has only a part of each weight."""
        return self._uneven is not None

    def uneven_passes(self) -> AbstractContextManager[None]:
        """A block in which processes that share a divided policy may make different numbers of
        forward passes. All of them must enter it, and no other collective call may run in it."""
        return contextlib.nullcontext() if self._uneven is None else self._uneven()

    @torch.no_grad()
    def _idle(self) -> None:
        _, layout = next(self.forward_passes([([0, 0], [False, True])]))
        with self.evaluating():
            self(move_data_to_device(layout, self.device))

    def load(
        self, device: torch.device | str = "cpu", mesh: DeviceMesh | None = None
    ) -> transformers.PreTrainedModel:
        """Load the weights, once. Later calls return the same network.

        Args:
            device: Where the base is put. On a CPU, Lightning moves weights that are not quantised.
            mesh: Processes that share the policy; all of them call this. Each keeps a part of every
                weight, and its device never has all of them.
        Raises:
            RecipeError: If the model cannot be loaded or divided, or is of a kind whose
                log-probabilities would be wrong.
        """
        fresh, device = self.network is None, torch.device(device)
        if fresh:
            # Lightning makes the GPU the default device meanwhile; tensors here name their own
            with torch.device("cpu"):
                self._load(device, divided=mesh is not None)
        if self.critic is None:
            self.value_head = None
        elif self.value_head is None:
            width = self.config.get_text_config().hidden_size
            self.value_head = ValueHead(width, self.device)
        try:
            if mesh is not None and self._uneven is None:
                self._divide(mesh)
            if fresh:
                with torch.device("cpu"):
                    self._choose_ways(device)
        except BaseException:
            self.network = self._uneven = None  # so that the next call refuses it too
            raise
        return cast(transformers.PreTrainedModel, self.network)

    def dtype_on(self, kind: str) -> torch.dtype:
        """The precision of activations on a kind of device, such as `cuda`."""
        auto = "bfloat16" if self.lora is not None and kind == "cuda" else "float32"
        return cast(torch.dtype, getattr(torch, auto if self.dtype == "auto" else self.dtype))

    def _load(self, device: torch.device, divided: bool) -> None:
        dtype = self.dtype_on(device.type)
        self._mixed = self.lora is None and dtype != torch.float32
        network = load_network(
            self.origin,
            self.config,
            torch.float32 if self._mixed else dtype,
            self.quantization == "nf4",
            torch.device("cpu") if divided else device,  # it is divided on the host
        )
        self._attends = take_over(network)
        self.in_force = {"attention while learning": "", "fused kernels": "none"}
        if self.fused_kernels and not divided:
            self.in_force["fused kernels"] = fuse(network, device)
        if self.lora is not None:
            network = with_adapter(network, self.lora)
            if self.origin.adapter is not None:
                self._start = start_adapter(network, self.origin.adapter)
        if self.gradient_checkpointing:
            recompute(network, self.gradient_checkpointing)
        self.network = network
        self._fingerprint = fingerprint(self.folder, self.origin.revision)
        network.train()  # transformers loads in eval mode; engines switch to it while they sample

    def _choose_ways(self, device: torch.device) -> None:
        """Try the network out where it is, and choose how to compute."""
        # with dropout, the output of a trained adapter would look wrong
        with self.evaluating():
            for layer in blocks_of(self.base) if self.divided else ():
                layer.training = True  # or layers are not recomputed, and keep what they cast
            if self.fused_kernels and self.divided:
                self.in_force["fused kernels"] = fuse(self.base, device, self.both_logits)
            check_head(self)
            self.way = choose_way(self)
        self.in_force["attention while learning"] = self.way.text

    @property
    def base(self) -> Any:
        """The transformers model itself, inside the adapter if there is one."""
        assert self.network is not None, "Policy.load() comes first"
        return cast(Any, self.network).get_base_model() if self.lora is not None else self.network

    @property
    def decoder(self) -> Any:
        """The base without its head."""
        decoder = self.base.get_decoder()
        # transformers 5.23 finds none in Llama4ForCausalLM, and gives the whole model
        return self.base.model if decoder is self.base else decoder

    @property
    def device(self) -> torch.device:
        """The device of the base's embeddings."""
        return cast(torch.device, self.base.get_input_embeddings().weight.device)

    def precision(self) -> AbstractContextManager[object]:
        """A context in which the network computes in `compute_dtype`, whatever type its weights
        have."""
        if not self._mixed:
            return contextlib.nullcontext()
        # the cache would keep the cast weights of all layers during a forward pass, for which a
        # divided policy has no room; a forward pass uses each weight once anyway
        return torch.autocast(self.device.type, self.compute_dtype, cache_enabled=not self.divided)

    @property
    def compute_dtype(self) -> torch.dtype:
        """Type of the activations."""
        return torch.bfloat16 if self._mixed else cast(torch.dtype, self.base.dtype)

    def hidden(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        attend: Attend | None = None,
        **kwargs: object,
    ) -> Tensor:
        """Last hidden states, (B, T, H).

        Args:
            input_ids: (B, T).
            attention_mask: (B, T); (B, 1, T, S) of bool; or None for the model's own mask, if no
                row is padded.
            position_ids: (B, T).
            attend: Computes the attention, in place of a mask.
            kwargs: Further arguments of transformers' forward pass.
        Raises:
            NotImplementedError: If the model's code cannot take `attend`.
        """
        if attend is not None:
            if not self._attends:
                raise NotImplementedError(f"{type(self.base).__name__} has attention of its own")
            kwargs["attend"] = attend
            attention_mask = no_mask(position_ids)
        with self.precision():
            output = self.decoder(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=False,
                **kwargs,
            )
        return cast(Tensor, output.last_hidden_state).to(self.compute_dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., H) -> (..., V), in float32."""
        head = self.base.get_output_embeddings()
        if type(head) is not nn.Linear:
            return cast(Tensor, head(hidden)).float()
        logits = head_logits(head, hidden.reshape(-1, hidden.shape[-1]))
        return logits.view(*hidden.shape[:-1], -1)

    @torch.no_grad()
    def both_logits(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of texts, (B, T) -> (B, T, V), computed twice: by the model's own code, and by
        `logits`."""
        with self.precision():
            own = self.base(input_ids=input_ids, use_cache=False).logits
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        states = self.hidden(input_ids, torch.ones_like(input_ids), positions)
        return own.float(), self.logits(states)

    def forward_passes(
        self,
        rows: Sequence[TokenRow],
        budget: int | None = None,
        owners: Sequence[int] | None = None,
    ) -> Iterator[ForwardPass]:
        """See `turnrl.policy.layout.forward_passes`; the policy's own budget is the default."""
        return forward_passes(rows, budget or self.budget, self.way.share, self.way.kernel, owners)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """A block in eval mode; afterwards each part is back in the mode that it had."""
        modes = [(part, part.training) for part in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training

    def score(
        self, rows: Sequence[TokenRow], budget: int | None = None, temperature: float = 1.0
    ) -> list[TokenScores]:
        """Scores of token sequences that carry the gradient to the trained weights, on the
        policy's device and in the mode that the policy is in. `read` is the same without a
        gradient. Memory grows with the rows, so give as many as one backward pass can hold.

        Args:
            rows: The sequences, and which of their tokens are scored.
            budget: The most tokens computed at once, but one sequence at least; None for the
                policy's own.
            temperature: As in sampling.
        Returns:
            For each sequence, the scores of its N_i tokens.
        """
        device = self.device
        scores: dict[int, TokenScores] = {}
        for numbers, layout in self.forward_passes(rows, budget):
            if self._uneven is not None and not torch.is_grad_enabled():
                self._uneven.announce()
            asked = self(move_data_to_device(layout, device), temperature)
            counts = [sum(rows[i][1]) for i in numbers]
            parts = zip(*(part.split(counts) for part in asked), strict=True)
            scores |= zip(numbers, itertools.starmap(TokenScores, parts), strict=True)
        return [scores[i] for i in range(len(rows))]

    @torch.no_grad()
    def read(
        self, rows: Sequence[TokenRow], budget: int | None = None, temperature: float = 1.0
    ) -> list[TokenScores]:
        """The scores of `score` without a gradient, in eval mode and on the CPU."""
        with self.uneven_passes(), self.evaluating():
            scores = self.score(rows, budget, temperature)
        return [TokenScores(*(part.cpu() for part in parts)) for parts in scores]

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """(T, V), on the CPU: logits after each of a text's T tokens, in eval mode."""
        read = torch.tensor([[*ids]], device=self.device)
        if self._uneven is not None:
            self._uneven.announce()
        with self.evaluating():
            hidden = self.hidden(read, None, torch.arange(len(ids)).to(read)[None])
            return self.logits(hidden)[0].float().cpu()

    def forward(self, layout: Layout, temperature: float = 1.0) -> TokenScores:
        """Scores of the tokens that a layout marks. All learning goes through here, and logits
        exist only for those tokens.

        Args:
            layout: Token sequences, on the policy's device.
            temperature: As in sampling, so that these are the sampler's own probabilities.
        Returns:
            The scores of the N tokens asked for.
        """
        mask = None if layout.attention_mask is None else layout.attention_mask.long()
        attend = layout.attend if mask is None else None
        hidden = self.hidden(layout.input_ids, mask, layout.position_ids, attend)
        states, targets = hidden.flatten(0, 1)[layout.before], layout.targets
        values = torch.zeros(len(targets), device=states.device)
        if self.critic is not None and self.value_head is not None:
            seen = states if self.critic.trains_policy else states.detach()
            values = self.value_head.values(seen)
        head = self.base.get_output_embeddings()
        chosen, entropy = chosen_logprobs(states, targets, self.logits, head, temperature)
        return TokenScores(*(part[layout.wanted] for part in (chosen, entropy, values)))

    def reference(self) -> AbstractContextManager[None]:
        """A context in which the policy is as training began: the base alone, or, if `model` names
        an adapter, the base with that adapter. No gradient may be computed in it."""
        assert self.lora is not None, "only a policy with an adapter has a reference"
        if self._start and self._uneven is not None and self._uneven.within:
            raise RecipeError(
                "a reward or an estimator asks for the adapter that training began with, and with "
                "trainer.strategy fsdp2 the other processes would still give parts of the trained "
                "one. Take ddp, or let model.policy.model be the base alone."
            )
        if self._start:
            return self._as_it_began()
        return cast(AbstractContextManager[None], cast(Any, self.network).disable_adapter())

    @contextlib.contextmanager
    def _as_it_began(self) -> Iterator[None]:
        """A block in which the adapter is as training began with it, without its dropout."""
        with self.evaluating(), exchanged(self._start):
            yield

    def refer_to_now(self) -> None:
        """Make the adapter as it is now the reference from here on."""
        if self.lora is not None:
            self._start = {p: p.detach().clone() for p in self.trainable_parameters().values()}

    def trainable_state(self) -> dict[str, Tensor]:
        """The trained weights by name, for a checkpoint. If processes share a divided policy, all
        of them have to call this, and the weights are whole in the first one."""
        return whole({name: p.detach() for name, p in self.trainable_parameters().items()})

    def parameter_groups(self) -> list[Any]:
        """The trained parameters for an optimiser, and the critic's head, if there is one, with
        its own learning rate."""
        trained = self.trainable_parameters()
        if self.value_head is None or self.critic is None:
            return [*trained.values()]
        own = [trained.pop(name) for name in list(trained) if name.startswith("value_head.")]
        return [{"params": [*trained.values()]}, {"params": own, "lr": self.critic.lr}]

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        """Trained parameters by name; `value_head` is the critic's."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def trained_bits(self) -> list[int]:
        """For each trained weight, the sum of its bits as integers: exact, in any order, so that it
        differs if the weights do. If processes share a divided policy, of this one's parts."""
        sums = []
        for parameter in self.trainable_parameters().values():
            own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            bits = own.detach().float().contiguous().view(torch.int32)
            sums.append(bits.sum(dtype=torch.int64))
        return torch.stack(sums).tolist() if sums else []

    @property
    def identity(self) -> dict[str, object]:
        """Facts that a checkpoint must share to fit this policy, wherever its model lies."""
        shape = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
        return {
            **{name: getattr(self.base.config, name) for name in shape},
            "lora": self.lora and self.lora.shape,
            "weights": self._fingerprint,
            "starting adapter": digest_of(self.origin.adapter),
        }

    def export(self, folder: str | Path, weights: Mapping[str, Tensor] | None = None) -> Path:
        """Write what was trained, for use without turnrl, with the tokenizer beside it.

        Under LoRA this writes the adapter, for `peft.PeftModel.from_pretrained`; otherwise the
        whole model, for `AutoModelForCausalLM.from_pretrained`. If processes share a divided
        policy, all of them call this, and the first one writes.

        Args:
            folder: Where to write.
            weights: Other trained weights than the present ones, by the names of
                `trainable_state`.
        Returns:
            The folder.
        Raises:
            RecipeError: If the folder holds the model that the policy was trained from.
        """
        assert self.network is not None, "Policy.load() comes first"
        folder = Path(folder)
        sources = (self.folder, self.origin.adapter)
        if folder.resolve() in [Path(source).resolve() for source in sources if source]:
            raise RecipeError(
                f"{str(folder)!r} holds the model that training starts from. Give another folder."
            )
        refuse_other_kind(folder, self.lora is not None)
        state = self.network_state() if self.divided else None
        if weights is not None:
            own = self.network.state_dict(keep_vars=True)  # tied weights have two names there
            others = {id(p): weights[n] for n, p in self.trainable_parameters().items()}
            state = {**own} if state is None else state
            state |= {n: others[id(p)] for n, p in own.items() if id(p) in others and n in state}
        if self.writes:
            folder.mkdir(parents=True, exist_ok=True)
            # peft would also save a base's embeddings and head that have an adapter
            alone: dict[str, Any] = {} if self.lora is None else {"save_embedding_layers": False}
            self.network.save_pretrained(folder, state_dict=state, **alone)
            self.tokenizer.save_pretrained(folder)
        return folder

    def network_state(self) -> dict[str, Tensor]:
        """The network's weights by name, or its adapter's. If processes share a divided policy, all
        of them have to call this, and the weights are whole in the first one."""
        assert self.network is not None, "Policy.load() comes first"
        return whole_state(self.network, trained_alone=self.lora is not None)

    @property
    def writes(self) -> bool:
        """False if another process writes the divided policy that this one shares."""
        return self._uneven is None or self._uneven.is_first
