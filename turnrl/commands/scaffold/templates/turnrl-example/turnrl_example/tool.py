"""A tool: something that the policy can call."""

import difflib
from collections.abc import Sequence
from typing import final

from turnrl import Tool, ToolCall, ToolResult, contained_answer
from turnrl_example.facts import FACTS, countries


@final
class ExampleLookup(Tool):
    """Finds the country that a query names, and says what is known of it.

    Args:
        suggestions: Near names that the policy reads, at most, if there is no such country.
    """

    # what the policy writes to call it, and what the prompt says about it
    name = "search"
    description = "Find facts about a country."
    # a JSON Schema: calls that do not fit it never reach `run`, the policy reads what was wrong
    parameters = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "maxLength": 200, "examples": ["capital of Peru"]}
        },
        "required": ["query"],
        "additionalProperties": False,
    }

    def __init__(self, suggestions: int = 3) -> None:
        self.suggestions = suggestions

    def run(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        # calls of many trajectories at once; several batches may run at a time, in threads
        return [self._find(call.arguments["query"]) for call in calls]

    def _find(self, query: str) -> ToolResult:
        for name, row in countries().items():
            if contained_answer(query, [name]):
                facts = " ".join(f"Its {fact} is {row[fact]}." for fact in FACTS)
                return ToolResult(f"{name} is a country. {facts}")
        # The policy's own mistake, told so that its next turn can do better. A broken world (a
        # server is down) is a `turnrl.ToolError` instead: it stops the run, and nothing learns
        # from an outage.
        place = query.rpartition(" of ")[2]
        near = difflib.get_close_matches(place, countries(), self.suggestions)
        hint = f"; there is {', '.join(near)}" if near else ""
        return ToolResult(f"the query names no country that is known{hint}", ok=False)
