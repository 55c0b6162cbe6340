"""The network of a policy: a causal language model, whole or with LoRA on a 4-bit base.

A recipe describes a `Policy` (`settings`). Its tokenizer loads first (`loading`), so that a mistake
in the recipe shows within a second. The weights load when Lightning asks for them.

Everything that computes is a method of `LanguageModel`, because torch gathers the parts of a
sharded policy (`sharding`) only in methods of the module that it has wrapped.
"""

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, cast, final

import torch
import transformers
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from turnrl.plugin.errors import RecipeError
from turnrl.policy.adapter import exchange_weights, start_adapter, with_adapter
from turnrl.policy.attention import no_mask, override_attention
from turnrl.policy.compute import checkpoint_activations, decoder_layers, fuse, head_logits
from turnrl.policy.export import exchange_trained, write_network
from turnrl.policy.head import ValueHead, token_logprobs
from turnrl.policy.layout import ForwardPass, Layout, forward_passes
from turnrl.policy.loading import ModelFiles
from turnrl.policy.settings import Policy
from turnrl.policy.sharding import UnevenPasses, gather_full, gather_full_state, local_part, shard
from turnrl.policy.trials import ForwardMethod, check_head, choose_method
from turnrl.types import Attend, Critic, TokenRow, TokenScores


@final
class LanguageModel(nn.Module):
    """The model that a `Policy` describes: its network, its adapter, its critic's head.

    Args:
        settings: What it is made of, and how it computes.
        critic: If given, loading adds a value head, which begins at zero.
        tokenizer: A tokenizer to use in place of the model's own.
    """

    def __init__(
        self,
        settings: Policy,
        critic: Critic | None = None,
        tokenizer: transformers.PreTrainedTokenizerBase | None = None,
    ) -> None:
        super().__init__()
        self.settings, self.lora, self.critic = settings, settings.lora, critic
        self.files = ModelFiles(settings, tokenizer)
        self.way = ForwardMethod(
            settings.share_prefixes, False, "not tried out before it is loaded"
        )
        """How its forward passes compute, chosen when it is loaded."""
        self.active_choices: dict[str, str] = {}
        """The choices made when it was loaded, for people to read."""
        self.value_head: ValueHead | None = None
        self.network: transformers.PreTrainedModel | None = None
        self._start: dict[nn.Parameter, Tensor] = {}
        self._attends = False
        self._mixed = False
        self._uneven: UnevenPasses | None = None

    @property
    def budget(self) -> int:
        """The most tokens computed at once while learning."""
        return self.settings.budget

    @property
    def folder(self) -> str:
        """See `ModelFiles.folder`."""
        return self.files.folder

    @cached_property
    def tokenizer(self) -> transformers.PreTrainedTokenizerBase:
        """See `ModelFiles.tokenizer`."""
        return self.files.tokenizer

    @property
    def config(self) -> transformers.PretrainedConfig:
        """See `ModelFiles.config`."""
        return self.files.config

    def _divide(self, mesh: DeviceMesh) -> None:
        """Keep a part of each weight in each process of a mesh. From then on all processes make
        equally many forward passes: see `uneven_passes`.

        Args:
            mesh: The processes.
        Raises:
            RecipeError: If the network has no layers to divide.
        """
        if not (layers := decoder_layers(self.base)):
            raise RecipeError(
                f"trainer.strategy is fsdp2, and {type(self.base).__name__} has no layers that "
                "transformers marks as such, which it divides. Take ddp."
            )
        began = {name: self._start.get(p) for name, p in self.trainable_parameters().items()}
        shard(self, layers, mesh, "next_logits", "compare_logits")
        parameters = self.trainable_parameters()
        self._start = {
            parameters[name]: local_part(weights, parameters[name])
            for name, weights in began.items()
            if weights is not None
        }
        self._uneven = UnevenPasses(mesh, self._idle)

    @property
    def is_sharded(self) -> bool:
        """True if this process has only a part of each weight."""
        return self._uneven is not None

    def uneven_passes(self) -> AbstractContextManager[None]:
        """A block in which processes that share a divided policy may make different numbers of
        forward passes. All of them must enter it, and no other collective call may run in it."""
        return contextlib.nullcontext() if self._uneven is None else self._uneven()

    @torch.no_grad()
    def _idle(self) -> None:
        _, layout = next(self.forward_passes([([0, 0], [False, True])]))
        with self.eval_mode():
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
        if self.critic is not None and self.value_head is None:
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

    def _load(self, device: torch.device, divided: bool) -> None:
        dtype = self.files.dtype_on(device.type)
        self._mixed = self.lora is None and dtype != torch.float32
        # what is divided is divided on the host
        network: Any = self.files.load(torch.device("cpu") if divided else device, self._mixed)
        self._attends = override_attention(network)
        self.active_choices = {"attention while learning": "", "fused kernels": "none"}
        if self.settings.fused_kernels and not divided:
            self.active_choices["fused kernels"] = fuse(network, device)
        if self.lora is not None:
            network = with_adapter(network, self.lora)
            if self.files.origin.adapter is not None:
                self._start = start_adapter(network, self.files.origin.adapter)
        if self.settings.gradient_checkpointing:
            checkpoint_activations(network, self.settings.gradient_checkpointing)
        self.network = network
        _ = self.files.identity  # of the files that these weights come from
        network.train()  # transformers loads in eval mode; engines switch to it while they sample

    def _choose_ways(self, device: torch.device) -> None:
        """Try the network out where it is, and choose how to compute."""
        # with dropout, the output of a trained adapter would look wrong
        with self.eval_mode():
            for layer in decoder_layers(self.base) if self.is_sharded else ():
                layer.training = True  # or layers are not recomputed, and keep what they cast
            if self.settings.fused_kernels and self.is_sharded:
                self.active_choices["fused kernels"] = fuse(self.base, device, self.compare_logits)
            check_head(self)
            self.way = choose_method(self)
        self.active_choices["attention while learning"] = self.way.text

    @property
    def base(self) -> Any:
        """The transformers model itself, inside the adapter if there is one."""
        assert self.network is not None, "LanguageModel.load() comes first"
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
        return torch.autocast(
            self.device.type, self.compute_dtype, cache_enabled=not self.is_sharded
        )

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
    def compare_logits(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:
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
    def eval_mode(self) -> Iterator[None]:
        """A block in eval mode; afterwards each part is back in the mode that it had."""
        modes = [(part, part.training) for part in self.modules()]
        self.eval()
        try:
            yield
        finally:
            for part, training in modes:
                part.training = training

    def score_with_grad(
        self, rows: Sequence[TokenRow], budget: int | None = None, temperature: float = 1.0
    ) -> list[TokenScores]:
        """Scores of token sequences that carry the gradient to the trained weights, on the
        policy's device and in the mode that the policy is in. `score_tokens` is the same
        without a gradient. Memory grows with the rows: give as many as one backward pass can hold.

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
    def score_tokens(
        self, rows: Sequence[TokenRow], budget: int | None = None, temperature: float = 1.0
    ) -> list[TokenScores]:
        """The scores of `score_with_grad` without a gradient, in eval mode and on the CPU."""
        with self.uneven_passes(), self.eval_mode():
            scores = self.score_with_grad(rows, budget, temperature)
        return [TokenScores(*(part.cpu() for part in parts)) for parts in scores]

    @torch.no_grad()
    def next_logits(self, ids: Sequence[int]) -> Tensor:
        """(T, V), on the CPU: logits after each of a text's T tokens, in eval mode."""
        read = torch.tensor([[*ids]], device=self.device)
        if self._uneven is not None:
            self._uneven.announce()
        with self.eval_mode():
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
        chosen, entropy = token_logprobs(states, targets, self.logits, head, temperature)
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
            return self._as_initial()
        return cast(AbstractContextManager[None], cast(Any, self.network).disable_adapter())

    @contextlib.contextmanager
    def _as_initial(self) -> Iterator[None]:
        """A block in which the adapter is as training began with it, without its dropout."""
        with self.eval_mode(), exchange_weights(self._start):
            yield

    def trainable_state(self) -> dict[str, Tensor]:
        """The trained weights by name, for a checkpoint. If processes share a divided policy, all
        of them have to call this, and the weights are whole in the first one."""
        return gather_full({name: p.detach() for name, p in self.trainable_parameters().items()})

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
        assert self.network is not None, "LanguageModel.load() comes first"
        folder = Path(folder)
        self.files.refuse_as_target(folder)
        state = self.network_state() if self.is_sharded else None
        if weights is not None:
            state = exchange_trained(self.network, self.trainable_parameters(), weights, state)
        if self.writes:
            write_network(self.network, folder, state, adapter=self.lora is not None)
            self.tokenizer.save_pretrained(folder)
        return folder

    def network_state(self) -> dict[str, Tensor]:
        """The network's weights by name, or its adapter's. If processes share a divided policy, all
        of them have to call this, and the weights are whole in the first one."""
        assert self.network is not None, "LanguageModel.load() comes first"
        return gather_full_state(self.network, trained_alone=self.lora is not None)

    @property
    def writes(self) -> bool:
        """False if another process writes the divided policy that this one shares."""
        return self._uneven is None or self._uneven.is_first
