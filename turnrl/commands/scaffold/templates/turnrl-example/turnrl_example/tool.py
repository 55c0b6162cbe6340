"""A tool: something that the policy can call."""

import difflib
from collections.abc import Sequence
from typing import final

from turnrl import Tool, ToolCall, ToolResult
from turnrl.plugin.text import find_contained_answer
from turnrl_example.facts import FACTS, countries


@final
class ExampleLookup(Tool):
    """Finds the country that a query names, and returns its facts.

    Args:
        suggestions: The most similar names to offer the policy if there is no such country.
    """

    # the policy calls the tool by its name, and the prompt contains its description
    name = "search"
    description = "Find facts about a country."
    # a JSON Schema: a call that does not match it never reaches `run`; the policy reads why
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
            if find_contained_answer(query, [name]):
                facts = " ".join(f"Its {fact} is {row[fact]}." for fact in FACTS)
                return ToolResult(f"{name} is a country. {facts}")
        # The policy's own mistake: it reads this message, and its next turn can do better. If the
        # world is broken (a server is down), raise `turnrl.ToolError` instead: the run stops, and
        # nothing learns from an outage.
        place = query.rpartition(" of ")[2]
        near = difflib.get_close_matches(place, countries(), self.suggestions)
        hint = f"; there is {', '.join(near)}" if near else ""
        return ToolResult(f"the query names no country that is known{hint}", ok=False)
