"""A player: an agent that drives its attempts itself."""

import re
from typing import final

from turnrl import Attempt, Message, Player, Reading, read_call

# The block that is closed first, whatever comes after it.
ACTION = re.compile(r"<(tool|answer)>((?:(?!</?(?:tool|answer)>).)*)</\1>", re.DOTALL)


@final
class ExampleDesk(Player):
    """Lets the policy search until it answers, and sends one answer back if nothing was looked up.

    Args:
        max_turns: The most replies of the policy.
        instructions: The system message, word for word.
    """

    # all that mean something: neither a question nor a tool's result can then contain them
    tags = ("tool", "answer", "result", "error")

    def __init__(self, max_turns: int = 4, instructions: str = "Tools: [search(query)]") -> None:
        self.max_turns = max_turns
        self.instructions = instructions

    async def play(self, attempt: Attempt) -> str | None:
        # whatever belongs to one attempt lives here: an instance plays many side by side
        messages: list[Message] = [
            {"role": "system", "content": self.instructions},
            {"role": "user", "content": attempt.question.text},
        ]
        looked_up = sent_back = False
        while True:  # `reply` ends this when no turn or no room is left
            reply = await attempt.reply(messages, stop=("</tool>", "</answer>"))
            action = ACTION.search(reply.text)
            if action is None:
                attempt.read(Reading(format_error="no call or answer that is closed"))
                remark = "<error>call a tool or answer</error>"
            elif action[1] == "tool":
                (result,) = await attempt.call([read_call(action[2].strip(), ("args",))])
                looked_up = looked_up or result.ok
                tag = "result" if result.ok else "error"
                remark = f"<{tag}>{result.content}</{tag}>"
            elif looked_up or sent_back:
                return action[2].strip()
            else:
                sent_back = True
                remark = "<error>look it up first</error>"
            # the reply stands there word for word, so that its tokens are kept
            messages.append({"role": "assistant", "content": reply.text})
            messages.append({"role": "user", "content": remark})
