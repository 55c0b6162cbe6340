"""An engine with weights of its own, as a server has them: it samples while the policy learns."""

import copy

from turnrl import Engine
from turnrl_slots import Slots


class Kept(Engine):
    """A `Slots` for each of the newest versions, on a copy of the policy of that time.

    Args:
        keeps: How many versions.
    """

    def __init__(self, keeps: int = 2) -> None:
        self.keeps = keeps
        self.copies: dict[int, Slots] = {}

    def start(self, policy, max_tokens):
        self._policy, self._max_tokens = policy, max_tokens

    def sync(self, version):
        if (old := self.copies.pop(version, None)) is not None:
            old.close()
        slots = Slots().build()
        slots.start(copy.deepcopy(self._policy), self._max_tokens)
        slots.sync(version)
        self.copies[version] = slots
        while len(self.copies) > self.keeps:
            self.copies.pop(min(self.copies)).close()

    def open(self, prompt_ids):
        return self.copies[max(self.copies)].open(prompt_ids)

    async def drain(self):
        for slots in [*self.copies.values()]:
            await slots.drain()

    def close(self):
        while self.copies:
            self.copies.popitem()[1].close()


def note(completions, log_metric, log_extra, **columns):
    """A reward function in TRL's signature that logs."""
    log_metric("attempts", len(completions))
    log_extra("turns", [len(turns) for turns in completions])
    return [0.0] * len(completions)
