"""An agent that summarises its context half-way, and goes on from the summary."""

from turnrl import Player, ToolCall


class Summariser(Player):
    """Searches twice, has the model sum up, and answers from the summary alone."""

    max_turns = 4

    async def play(self, attempt):
        question = attempt.question.text
        messages = [{"role": "user", "content": question}]
        for _ in range(2):
            text = (await attempt.reply(messages)).text
            (result,) = await attempt.call([ToolCall("echo", {"text": text})])
            messages += [
                {"role": "assistant", "content": text},
                {"role": "user", "content": result.content},
            ]
        messages[-1]["content"] += " Sum up."
        notes = (await attempt.reply(messages)).text
        anew = [{"role": "user", "content": f"{question} Notes: {notes}"}]
        return (await attempt.reply(anew)).text
