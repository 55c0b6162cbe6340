"""How a version of the weights gets to the servers: as files that they read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from turnrl import EngineError, SampledPolicy, adapted_layers
from turnrl.servers import Unavailable
from turnrl_vllm.group import Group
from turnrl_vllm.server import Refused, Server

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_RELOAD = "/collective_rpc"


class Weights(ABC):
    """The versions that the servers have.

    Args:
        policy: Whose weights act.
        group: The servers.
        folder: A folder that this process writes and the servers read.
        keeps: So many versions are kept.
    """

    def __init__(self, policy: SampledPolicy, group: Group, folder: Path, keeps: int) -> None:
        self.policy, self.group, self.folder, self.keeps = policy, group, folder, keeps
        self.newest = -1
        """The newest version."""

    @abstractmethod
    def publish(self, version: int) -> None:
        """Let the servers sample with the weights as they are now.

        Raises:
            EngineError: If no server can be reached, or one refuses.
        """

    @abstractmethod
    async def sample(self, server: Server, version: int, body: dict[str, Any]) -> tuple[Any, int]:
        """A server's answer to a request for a turn, and the version that sampled it.

        Args:
            server: The server.
            version: The one that is asked for.
            body: The request, without the name of a model.
        Raises:
            Unavailable: If the server cannot be reached.
            Refused: If it does not do it.
        """

    @abstractmethod
    def ask(self, server: Server, body: dict[str, Any]) -> Any:
        """A server's answer to the same with the newest version, outside of the event loop."""

    @abstractmethod
    def has(self, version: int) -> bool:
        """Whether turns can be sampled for a session that began with this version."""

    def close(self) -> None:
        """Remove the files, and what the servers have of them."""
        shutil.rmtree(self.folder, ignore_errors=True)


@final
class Adapters(Weights):
    """The adapter alone, under a new name for each version. A name is never loaded twice, because
    vLLM's cache of prefixes goes by it."""

    def __init__(self, policy: SampledPolicy, group: Group, folder: Path, keeps: int) -> None:
        super().__init__(policy, group, folder, keeps)
        self._run = secrets.token_hex(4)  # other runs may use the same servers
        self._under_way: dict[int, int] = {}
        """Requests under way, by version; of all versions that the servers have."""

    def publish(self, version: int) -> None:
        folder = self.folder / str(version)
        write(self.policy, folder)
        self._under_way[version] = 0
        self.group.ask(lambda server: self._load(server, version))
        self.newest = version
        for old in sorted(self._under_way)[: -self.keeps]:
            if not self._under_way[old]:
                del self._under_way[old]
                self._unload(old)

    async def sample(self, server: Server, version: int, body: dict[str, Any]) -> tuple[Any, int]:
        body = body | self._model(version)
        self._under_way[version] += 1
        try:
            if self.name(version) in server.has:
                try:
                    return await server.ask_async("/v1/completions", body), version
                except Refused as error:
                    if error.status != 404:
                        raise
                # it was started again since, and has forgotten its adapters
                server.has.clear()
            await self._load_async(server, version)
            return await server.ask_async("/v1/completions", body), version
        finally:
            self._under_way[version] -= 1

    def ask(self, server: Server, body: dict[str, Any]) -> Any:
        return server.ask("POST", "/v1/completions", body | self._model(self.newest))

    def has(self, version: int) -> bool:
        return version in sorted(self._under_way)[-self.keeps :]

    def name(self, version: int) -> str:
        """The name of a version's adapter."""
        return f"turnrl-{self._run}-{version}"

    def _model(self, version: int) -> dict[str, str]:
        return {"model": self.name(version)}

    def _order(self, version: int) -> dict[str, str]:
        return {"lora_name": self.name(version), "lora_path": str(self.folder / str(version))}

    def _load(self, server: Server, version: int) -> None:
        try:
            server.ask("POST", "/v1/load_lora_adapter", self._order(version))
        except Refused as error:
            self._unless_loaded(server, error)
        server.has.add(self.name(version))

    async def _load_async(self, server: Server, version: int) -> None:
        try:
            await server.ask_async("/v1/load_lora_adapter", self._order(version))
        except Refused as error:
            self._unless_loaded(server, error)
        server.has.add(self.name(version))

    def _unless_loaded(self, server: Server, error: Refused) -> None:
        if "already been loaded" not in error.problem:
            raise refused_adapter(server, error, self.folder)

    def close(self) -> None:
        for version in self._under_way:
            self._unload(version)
        self._under_way.clear()
        super().close()

    def _unload(self, version: int) -> None:
        """Let the servers forget a version; one that cannot be reached has nothing to forget."""
        name = self.name(version)
        for server in self.group.servers:
            if name in server.has:
                server.has.discard(name)
                with contextlib.suppress(Unavailable, Refused):
                    server.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name}, within_s=5)
        shutil.rmtree(self.folder / str(version), ignore_errors=True)


@final
class WholeModel(Weights):
    """All weights, in place of those before. Turns that are under way end first, and nothing that
    was read with older weights is used again (`cache_salt`)."""

    def __init__(self, policy: SampledPolicy, group: Group, folder: Path, keeps: int) -> None:
        super().__init__(policy, group, folder, keeps)
        self._lock = threading.Condition()
        self._under_way, self._changing = 0, False
        self._has: dict[Server, int] = {}

    def publish(self, version: int) -> None:
        folder = self.folder / str(version)
        write(self.policy, folder)
        with self._changed():
            self.group.ask(lambda server: self._load(server, folder, version))
            old, self.newest = self.newest, version
        if old != version:
            shutil.rmtree(self.folder / str(old), ignore_errors=True)

    async def sample(self, server: Server, version: int, body: dict[str, Any]) -> tuple[Any, int]:
        while not self._enter():
            await asyncio.sleep(0.01)
        try:
            version = self.newest
            if server.was_lost or self._has.get(server) != version:
                # it may have been started again since, with the weights that training began from
                where = self.folder / str(version)
                await server.ask_async(_RELOAD, _reload(where))
                self._has[server] = version
            return await server.ask_async("/v1/completions", self._whole(server, body)), version
        finally:
            self._leave()

    def ask(self, server: Server, body: dict[str, Any]) -> Any:
        return server.ask("POST", "/v1/completions", self._whole(server, body))

    def has(self, version: int) -> bool:
        return version > self.newest - self.keeps or version == self.newest

    def _whole(self, server: Server, body: dict[str, Any]) -> dict[str, Any]:
        return body | {"model": server.base, "cache_salt": f"turnrl {self.newest}"}

    def _load(self, server: Server, folder: Path, version: int) -> None:
        try:
            server.ask("POST", _RELOAD, _reload(folder), within_s=600)
        except Refused as error:
            raise EngineError(
                f"vLLM at {server} does not read weights from {str(folder)!r} ({error}). It needs "
                "VLLM_SERVER_DEV_MODE=1 in its environment and has to see this folder "
                "(model.engine.folder). Or train an adapter: model.policy.lora."
            ) from error
        self._has[server] = version

    @contextlib.contextmanager
    def _changed(self) -> Iterator[None]:
        """Within it no turn is under way."""
        with self._lock:
            self._changing = True
            self._lock.wait_for(lambda: not self._under_way)
        try:
            yield
        finally:
            with self._lock:
                self._changing = False

    def _enter(self) -> bool:
        with self._lock:
            self._under_way += not self._changing
            return not self._changing

    def _leave(self) -> None:
        with self._lock:
            self._under_way -= 1
            self._lock.notify_all()


def write(policy: SampledPolicy, folder: Path) -> None:
    """Write what is trained, without the tokenizer, which does not change.

    Raises:
        EngineError: If the folder cannot be written.
    """
    network = policy.load()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if adapted_layers(network):
            network.save_pretrained(folder)
        else:
            _write_whole(network, folder)
    except OSError as error:
        raise EngineError(
            f"the weights for vLLM cannot be written to {str(folder)!r} ({error}). Free space, or "
            "set model.engine.folder to a folder that this process writes and the servers read."
        ) from error


def _write_whole(network: PreTrainedModel, folder: Path) -> None:
    """Write a model with a head of its own. vLLM 0.32 on a CPU keeps a packed copy of a head that
    is tied to the embedding, and does not renew it when it reads weights again."""
    from safetensors.torch import save_file

    head = network.get_output_embeddings()
    (name,) = (name for name, module in network.named_modules() if module is head)
    tensors = {key: value.detach().contiguous() for key, value in network.state_dict().items()}
    tensors[f"{name}.weight"] = head.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    network.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [type(network).__name__], "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))


def refused_adapter(server: Server, error: Refused, folder: Path) -> EngineError:
    """Why a server has not loaded an adapter, and the next step."""
    step = "Look into its log."
    if error.status == 404 and "no adapter found" in error.problem.lower():
        step = (
            f"It does not see the folder {str(folder)!r}. Set model.engine.folder to one that both "
            "see."
        )
    elif "rank" in error.problem.lower():
        step = "Start it with a larger --max-lora-rank, or lower model.policy.lora.r."
    elif error.status in (404, 405):
        step = (
            "Start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
            "environment."
        )
    return EngineError(f"vLLM at {server} does not load an adapter ({error}). {step}")


def _reload(folder: Path) -> dict[str, Any]:
    return {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
