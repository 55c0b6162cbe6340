"""Rollouts: the agent loop, one coroutine per trajectory, with tools running beside generation.

`Rollout` is what a recipe configures; `collect` is what the module calls. Whatever the policy does
is data. Whatever the world does wrong is an exception, and ends the collection with nothing
collected.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast, final

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from tqdm.auto import tqdm

from turnrl.engines import RolloutEngine, Sampling, Session
from turnrl.errors import DataError, PluginError, RecipeError, ToolError, TurnRLError
from turnrl.text import neutralise
from turnrl.types import (
    Message,
    Question,
    Segmenter,
    Stop,
    Tool,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

MAX_RESULT_CHARACTERS = 1_000_000
"""A tool that returns more than this is broken; below it, results are cut to a token budget."""
_SHUTDOWN_S = 30.0
"""After Ctrl-C, how long the forward pass under way may take to end."""
_GATHER_S = 0.003
"""Calls of one tool that arrive within this time leave as one batch."""


@final
class ChatFormat:
    """Token-exact chat: the prompt is rendered once, then everything is appended.

    The chat template is rendered on probes, which gives the markup between an assistant's text and
    the next one. Tool text is tokenised on its own, with special tokens split, so it can never
    become one.

    Args:
        tokenizer: With a chat template.
    Raises:
        RecipeError: If the template does not keep what came before when a message is appended.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        question, said, seen = (
            "turnrl question",
            "<think>turnrl thought</think>turnrl action",
            "turnrl result",
        )
        user: Message = {"role": "user", "content": question}
        exchange: list[Message] = [
            {"role": "assistant", "content": said},
            {"role": "user", "content": seen},
        ]
        prompt = self._render([user])
        once = self._render([user, *exchange])
        twice = self._render([user, *exchange, *exchange])
        between = once.removeprefix(prompt + said)
        if not once.startswith(prompt + said) or between.count(seen) != 1:
            self._refuse(once, prompt + said)
        if twice != prompt + (said + between) * 2:
            self._refuse(twice, prompt + (said + between) * 2)
        before, after = between.split(seen)
        self._before, self._after = self._ids(before), self._ids(after)
        special = set(tokenizer.all_special_ids) | set(tokenizer.get_added_vocab().values())
        self.end_of_turn = self._before[0] if self._before and self._before[0] in special else None
        ends = {tokenizer.eos_token_id, self.end_of_turn} - {None}
        self.end_ids = tuple(sorted(cast("set[int]", ends)))
        # some vocabularies add runs of white space, which control nothing
        added = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
        self.control_tokens = tuple(str(token) for token in added if str(token).strip())

    def _refuse(self, found: str, wanted: str) -> None:
        same = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), 0)
        raise RecipeError(
            f"the chat template of {self._tokenizer.name_or_path!r} is not prefix-preserving: "
            "appending a message changes what came before (it renders "
            f"{found[same : same + 40]!r} where {wanted[same : same + 40]!r} was). Give a plain "
            "template in policy.chat_template."
        )

    def _render(self, messages: Sequence[Message]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:
            roles = ", ".join(m["role"] for m in messages)
            raise RecipeError(
                f"the chat template of {self._tokenizer.name_or_path!r} fails on messages of "
                f"{roles}: {error}. Give one that takes them in policy.chat_template."
            ) from error
        return cast(str, text)

    def _ids(self, text: str, control: bool = True) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, split_special_tokens=not control)
        return cast("list[int]", encoded["input_ids"])

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of the rendered messages, up to where the assistant speaks."""
        return tuple(self._ids(self._render(messages)))

    def observation(self, text: str, after: int | None) -> tuple[int, ...]:
        """Ids to append so that the policy reads `text` as the user's message and speaks next.

        Args:
            text: The message; none of it becomes a control token.
            after: The last sampled id. If it is the end-of-turn token, that is not repeated.
        """
        before = (
            self._before[1:] if after is not None and after == self.end_of_turn else self._before
        )
        return (*before, *self._ids(text, control=False), *self._after)

    def text(self, ids: Sequence[int]) -> str:
        """What was said: decoded ids without the token that ended it."""
        said = list(ids)
        if said and said[-1] in self.end_ids:
            said.pop()
        return cast(str, self._tokenizer.decode(said))

    def cut(self, text: str, tokens: int) -> str:
        """At most `tokens` tokens of `text`, from its beginning."""
        # tokenising megabytes to keep a few hundred tokens would be slow
        head = text[: tokens * 32]
        ids = self._ids(head, control=False)
        if len(ids) <= tokens and len(head) == len(text):
            return text
        return cast(str, self._tokenizer.decode(ids[:tokens])).rstrip("\ufffd")


class _Lockstep:
    """A barrier that shrinks: turn k + 1 starts when every trajectory still going has ended turn
    k.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self._arrived = 0
        self._gate = asyncio.Event()

    async def arrive(self) -> None:
        self._arrived += 1
        self._release()
        await self._gate.wait()

    def leave(self) -> None:
        self._members -= 1
        self._release()

    def _release(self) -> None:
        if self._arrived and self._arrived >= self._members:
            self._arrived = 0
            # in the next tick, so that whoever came last waits like the others and all wake in one
            # tick
            asyncio.get_running_loop().call_soon(self._open, self._gate)

    def _open(self, gate: asyncio.Event) -> None:
        self._gate = asyncio.Event()
        gate.set()


class _Desk:
    """Where the calls of one tool arrive, and leave in batches."""

    def __init__(self, tool: Tool) -> None:
        self._tool = tool
        self._queue: list[tuple[ToolCall, asyncio.Future[ToolResult]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def call(self, call: ToolCall) -> ToolResult:
        future: asyncio.Future[ToolResult] = asyncio.get_running_loop().create_future()
        self._queue.append((call, future))
        if len(self._queue) == 1:
            task = asyncio.create_task(self._dispatch())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return await future

    async def _dispatch(self) -> None:
        await asyncio.sleep(_GATHER_S)
        batch, self._queue = self._queue, []
        try:
            results = await self._run([call for call, _ in batch])
        except Exception as error:
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), result in zip(batch, results, strict=True):
            if not future.done():
                future.set_result(result)

    async def _run(self, calls: list[ToolCall]) -> Sequence[ToolResult]:
        tool = self._tool
        example = json.dumps(dict(calls[0].arguments), ensure_ascii=False, default=str)[:200]
        what = f"tool {tool.name!r} ({type(tool).__name__})"
        try:
            if inspect.iscoroutinefunction(tool.run):
                work: Awaitable[Any] = tool.run(calls)
            else:
                work = _in_daemon_thread(lambda: tool.run(calls))
            results = await asyncio.wait_for(work, tool.timeout_s)
        except TimeoutError as error:
            raise ToolError(
                f"{what} did not answer {len(calls)} calls within timeout_s = {tool.timeout_s:g}; "
                f"the first had arguments {example}. Raise its timeout_s, or find out why it "
                "hangs."
            ) from error
        except TurnRLError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise ToolError(
                f"{what} raised {type(error).__name__}: {error} on {len(calls)} calls; the first "
                f"had arguments {example}. Mend the tool; for a mistake of the policy it should "
                "return ToolResult(ok=False)."
            ) from error
        if not isinstance(results, Sequence) or len(results) != len(calls):
            count = len(results) if isinstance(results, Sequence) else type(results).__name__
            raise ToolError(
                f"{what} returned {count} for {len(calls)} calls; run() gives one ToolResult per "
                "call."
            )
        for result in results:
            if not isinstance(result, ToolResult) or not isinstance(result.content, str):
                raise ToolError(
                    f"{what} returned {type(result).__name__}, but run() gives ToolResult with "
                    "text."
                )
            if len(result.content) > MAX_RESULT_CHARACTERS:
                raise ToolError(
                    f"{what} returned a result of {len(result.content):,} characters for "
                    f"arguments {example}; at most {MAX_RESULT_CHARACTERS:,} are accepted. Cut "
                    "results inside the tool."
                )
        return cast("Sequence[ToolResult]", results)


@final
class Rollout:
    """How the agent acts: the turn scheme, the tools, and the limits.

    Args:
        segmenter: What a turn is.
        tools: What the policy can call.
        temperature: Of sampling while collecting; evaluation is greedy.
        max_turn_tokens: The most tokens the policy samples in one turn.
        max_result_tokens: The most tokens of one tool result that the policy reads; rewards see the
            same text.
        max_tokens: The most tokens of a whole trajectory: prompt, turns and results.
        lockstep: Start the next turn when all trajectories have ended theirs. Batches, and so every
            last digit, then do not depend on how fast tools answer. Without it slow tools overlap
            with generation.
        slots: The most trajectories sampled at once.
    """

    def __init__(
        self,
        segmenter: Segmenter,
        tools: list[Tool],
        temperature: float = 1.0,
        max_turn_tokens: int = 512,
        max_result_tokens: int = 512,
        max_tokens: int = 2048,
        lockstep: bool = True,
        slots: int = 256,
    ) -> None:
        if temperature <= 0:
            raise RecipeError(
                f"rollout.temperature is {temperature}; learning needs samples that differ, so it "
                "must be above 0"
            )
        for name, value in [
            ("max_turn_tokens", max_turn_tokens),
            ("max_result_tokens", max_result_tokens),
            ("max_tokens", max_tokens),
            ("slots", slots),
        ]:
            if value < 1:
                raise RecipeError(f"rollout.{name} is {value}; it must be at least 1")
        if segmenter.max_turns < 1:
            raise RecipeError(
                f"{type(segmenter).__name__}.max_turns is {segmenter.max_turns}; at least 1 is "
                "needed"
            )
        names = [tool.name for tool in tools]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise RecipeError(
                f"two tools are called {twice!r}; the policy could not tell them apart. Rename one."
            )
        for tool in tools:
            try:
                Draft202012Validator.check_schema(tool.parameters)
            except SchemaError as error:
                raise RecipeError(
                    f"tool {tool.name!r} ({type(tool).__name__}) has parameters that are no JSON "
                    f"Schema: {error.message}"
                ) from error
        self.segmenter = segmenter
        self.tools = tools
        self.temperature = temperature
        self.max_turn_tokens = max_turn_tokens
        self.max_result_tokens = max_result_tokens
        self.max_tokens = max_tokens
        self.lockstep = lockstep
        self.slots = slots

    @cached_property
    def _validators(self) -> dict[str, Draft202012Validator]:
        return {tool.name: Draft202012Validator(tool.parameters) for tool in self.tools}

    def check(self, chat: ChatFormat) -> None:
        """Preflight the prompt and every tool.

        Args:
            chat: The policy's chat format, which has to take the segmenter's messages.
        Raises:
            RecipeError: If it does not.
            ToolError: From the first tool that cannot work.
        """
        chat.prompt(self._ask("prompt", Question("check", "?", ("!",)), self.tools))
        for tool in self.tools:
            try:
                tool.check()
            except TurnRLError:
                raise
            except Exception as error:
                raise ToolError(
                    f"tool {tool.name!r} ({type(tool).__name__}) failed its check: "
                    f"{type(error).__name__}: {error}"
                ) from error

    def collect(
        self,
        engine: RolloutEngine,
        chat: ChatFormat,
        questions: Sequence[Question],
        group_size: int,
        seed: Sequence[int],
        greedy: bool = False,
        description: str | None = None,
    ) -> list[list[Trajectory]]:
        """Let the policy act on each question `group_size` times. Blocks; safe inside a notebook.

        Args:
            engine: Whose weights act.
            chat: The policy's chat format.
            questions: What to ask.
            group_size: G, trajectories per question.
            seed: Integers that name the collection; trajectory and turn numbers are added to them.
            greedy: Take the likeliest tokens instead of sampling.
            description: Of a progress bar, shown if the collection takes more than a few seconds.
        Returns:
            G trajectories for each question, in order.
        Raises:
            ToolError: If a tool's world is broken.
            DataError: If a question leaves no room to act within `max_tokens`.
        """
        return _on_loop(
            self._collect(engine, chat, questions, group_size, seed, greedy, description)
        )

    async def _collect(
        self,
        engine: RolloutEngine,
        chat: ChatFormat,
        questions: Sequence[Question],
        group_size: int,
        seed: Sequence[int],
        greedy: bool,
        description: str | None,
    ) -> list[list[Trajectory]]:
        desks = {tool.name: _Desk(tool) for tool in self.tools}
        lockstep = _Lockstep(len(questions) * group_size) if self.lockstep else None
        total = len(questions) * group_size
        hidden = True if description is None else None  # None: shown on a terminal only
        bar = tqdm(total=total, desc=description, delay=3, leave=False, disable=hidden, unit="traj")
        sessions: list[Session] = []
        tasks: list[list[asyncio.Task[Trajectory]]] = []
        try:
            async with asyncio.TaskGroup() as crowd:
                for q, question in enumerate(questions):
                    prompt_ids = chat.prompt(self._ask("prompt", question, self.tools))
                    if len(prompt_ids) >= self.max_tokens:
                        raise DataError(
                            f"question {question.id!r} makes a prompt of {len(prompt_ids)} "
                            "tokens, which leaves no room within rollout.max_tokens = "
                            f"{self.max_tokens}. Raise it, or leave the question out."
                        )
                    root = engine.open(prompt_ids)
                    members = [root.fork() for _ in range(group_size)]
                    root.close()
                    sessions += members
                    tasks.append([])
                    for g, session in enumerate(members):
                        act = self._act(
                            session,
                            chat,
                            question,
                            prompt_ids,
                            (*seed, q, g),
                            greedy,
                            desks,
                            lockstep,
                        )
                        task = crowd.create_task(act)
                        task.add_done_callback(lambda _: bar.update())
                        tasks[-1].append(task)
        except BaseExceptionGroup as group:
            raise _first(group) from None
        finally:
            bar.close()
            for session in sessions:
                session.close()
            await engine.drain()
        return [[task.result() for task in of_group] for of_group in tasks]

    async def _act(
        self,
        session: Session,
        chat: ChatFormat,
        question: Question,
        prompt_ids: tuple[int, ...],
        seed: tuple[int, ...],
        greedy: bool,
        desks: dict[str, _Desk],
        lockstep: _Lockstep | None,
    ) -> Trajectory:
        """The decision process itself: sample a turn, read it, act, observe, until done."""
        turns: list[Turn] = []
        new_ids: tuple[int, ...] = ()
        room = self.max_tokens - len(prompt_ids)
        stop: Stop | None = None
        try:
            while stop is None:
                k = len(turns)
                if lockstep is not None:
                    await lockstep.arrive()
                sampling = Sampling(
                    max_tokens=min(self.max_turn_tokens, room),
                    temperature=0.0 if greedy else self.temperature,
                    seed=stream_seed(*seed, k),
                    stop=self.segmenter.stop,
                    end_ids=chat.end_ids,
                )
                completion = await session.generate(new_ids, sampling)
                room -= len(completion.token_ids)
                text = chat.text(completion.token_ids)
                reading = self._ask("read", text, k)
                turn = Turn(text, completion.token_ids, completion.logprobs, reading)
                if reading.answer is not None:
                    stop = "answer"
                elif completion.reason == "length":
                    stop = "length"
                else:
                    last = k + 1 == self.segmenter.max_turns
                    if reading.calls:
                        results = await asyncio.gather(
                            *(self._reply(c, chat, desks) for c in reading.calls)
                        )
                        turn = replace(turn, results=tuple(results))
                    if last:
                        stop = "turns"
                    else:
                        observation = self._ask("observe", reading, turn.results)
                        new_ids = chat.observation(observation, completion.token_ids[-1])
                        room -= len(new_ids)
                        if room < 1:
                            stop = "length"
                        else:
                            turn = replace(turn, observation_ids=new_ids)
                turns.append(turn)
        finally:
            session.close()  # at once: what it keeps on the device is large
            if lockstep is not None:
                lockstep.leave()
        return Trajectory(question, prompt_ids, tuple(turns), stop)

    async def _reply(self, call: ToolCall, chat: ChatFormat, desks: dict[str, _Desk]) -> ToolResult:
        """What the policy reads in answer to a call: the tool's reply, or what is wrong with the
        call.
        """
        problem = self._problem(call)
        result = ToolResult(problem, ok=False) if problem else await desks[call.name].call(call)
        cut = chat.cut(result.content, self.max_result_tokens)
        safe = neutralise(cut, self.segmenter.tags, chat.control_tokens)
        safe = chat.cut(safe, self.max_result_tokens)  # what is inert may be longer
        return replace(result, content=safe)

    def _ask(self, method: str, *arguments: Any) -> Any:
        """What the segmenter says; it is to be total, so an exception is a fault of its package."""
        try:
            return getattr(self.segmenter, method)(*arguments)
        except Exception as error:
            raise PluginError(
                f"{type(self.segmenter).__name__}.{method} raised {type(error).__name__}: {error} "
                f"on {str(arguments[0])[:200]!r}. A segmenter must accept any text; mend it, and "
                "try turnrl.testing.check_segmenter on it."
            ) from error

    def _problem(self, call: ToolCall) -> str | None:
        if call.error is not None:
            return call.error
        validator = self._validators.get(call.name)
        if validator is None:
            return f"no tool {call.name[:40]!r}; there is {', '.join(self._validators) or 'none'}"
        error = best_match(validator.iter_errors(dict(call.arguments)))
        return None if error is None else f"bad arguments: {error.message[:120]}"


def stream_seed(*key: int) -> int:
    """A random stream's number from what it belongs to; different keys give independent streams."""
    return int(np.random.SeedSequence([k % 2**32 for k in key]).generate_state(1, np.uint64)[0])


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The exception that a user should see of a group in which one failure cancelled the rest."""
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            return _first(error)
        return error
    return group


async def _in_daemon_thread(function: Callable[[], T]) -> T:
    """Run in a thread that does not keep the process alive: a hanging tool cannot be killed, only
    left.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(cast(T, result))
        else:
            future.set_exception(error)

    def work() -> None:
        result: T | None = None
        problem: BaseException | None = None
        try:
            result = function()
        except StopIteration as error:  # cannot be raised out of a future
            problem = RuntimeError(f"StopIteration: {error}")
        except Exception as error:
            problem = error
        except BaseException as error:  # SystemExit, say: it is to end the run, not the event loop
            problem = RuntimeError(f"{type(error).__name__}: {error}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=work, daemon=True, name="turnrl-tool").start()
    return await future


_loop: asyncio.AbstractEventLoop | None = None
_loop_lock = threading.Lock()


def _on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the event loop's own thread and wait for it; Ctrl-C cancels it first.

    A loop of its own works where one is running already, as in a notebook.
    """
    global _loop
    with _loop_lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, daemon=True, name="turnrl-rollout").start()
    ended = threading.Event()

    async def supervised() -> T:
        try:
            return await work
        finally:
            ended.set()

    future = asyncio.run_coroutine_threadsafe(supervised(), _loop)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        ended.wait(_SHUTDOWN_S)  # a cancelled future is done at once; the work behind it is not
        raise
