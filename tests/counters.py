"""A tool that counts for each trajectory, and checks whose sessions it is given and closes."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally

from turnrl import ForkableToolSession, Stateful, Tool, ToolResult


class Count(ForkableToolSession):
    """A number; it notes how it is closed."""

    def __init__(self, tool, number=0):
        self.tool, self.number = tool, number
        tool.opened.append(self)

    def fork(self):
        return type(self)(self.tool, self.number)

    def close(self):
        self.tool.closed.append(self)


class PatientCount(Count):
    async def fork(self):
        await asyncio.sleep(0.001)
        return Count.fork(self)

    async def close(self):
        await asyncio.sleep(0.02)
        self.tool.closed.append(self)


class Counter(Stateful, Tool):
    """Adds to a number that each trajectory has for itself."""

    name = "add"
    description = "Add to your number."
    parameters = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
    }
    session = Count
    timeout_s = 5.0

    def __init__(self):
        self.opened, self.closed, self.batches = [], [], []
        self.busy = Tally()

    def open(self, question):
        return self.session(self)

    def run(self, calls):
        self.batches.append([call.session for call in calls])
        self.busy.update({call.session for call in calls})
        assert max(self.busy.values(), default=0) <= 1, "a session is in two batches at once"
        results = [self.add(call) for call in calls]
        self.busy.subtract({call.session for call in calls})
        return results

    def add(self, call):
        call.session.number += call.arguments["n"]
        return ToolResult(str(call.session.number))

    def check_closed(self, count):
        """Every session was closed, once."""
        assert len(self.opened) == count
        assert Tally(map(id, self.closed)) == Tally(map(id, self.opened))


class PatientCounter(Counter):
    session = PatientCount

    async def open(self, question):
        await asyncio.sleep(0.002)
        return Counter.open(self, question)

    async def run(self, calls):
        await asyncio.sleep(0.002)
        return Counter.run(self, calls)


class SlowlyMade(Counter):
    """Plain methods that give awaitables."""

    def open(self, question):
        time.sleep(0.005)
        return PatientCounter.open(self, question)

    def run(self, calls):
        return PatientCounter.run(self, calls)
