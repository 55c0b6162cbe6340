"""An agent that is a plain coroutine: it asks the model, looks things up, and answers."""

from turnrl import Player, ToolCall


async def answer(question, ask, look_up):
    """The agent, which knows nothing of turnrl.

    Args:
        question: A text.
        ask: Awaits the model's reply to chat messages.
        look_up: Awaits what a search finds.
    """
    messages = [{"role": "user", "content": f"{question} Name what to look up."}]
    for _ in range(2):
        wanted = await ask(messages)
        if "a" in wanted:
            return wanted
        found = await look_up(wanted)
        messages.append({"role": "assistant", "content": wanted})
        messages.append({"role": "user", "content": f"{found} Go on."})
    return None


class PlainAgent(Player):
    """Lets the coroutine drive."""

    max_turns = 2

    async def play(self, attempt):
        async def ask(messages):
            return (await attempt.reply(messages)).text

        async def look_up(text):
            (result,) = await attempt.call([ToolCall("echo", {"text": text})])
            return result.content

        return await answer(attempt.question.text, ask, look_up)
