"""One model call of a run: the prompt, the text as it comes, what the model wrote.

Stateless but for the call. A prompt that does not fit into the model's context is asked again with
less of the history, twice at most (agent_svc/domain/tool_format.py says what is left out).

A call writes no more than the run's budget leaves beside the prompt. Before the call the prompt's
tokens are estimated, so that one that cannot fit is not made; the engine, which counts them, keeps
prompt and output within what is left, or refuses the call.
After a reply that ran on until it was cut off, or that only repeated what was asked, the same is
asked again, without a word of it, and sampled otherwise: a small model that is asked alike, and
greedy, writes the same again, and it copies complaints.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from agent_svc.adapters.live_text import LiveText
from agent_svc.domain.history import History
from agent_svc.domain.model import ModelStep, Task
from agent_svc.domain.next_action import CallModel
from agent_svc.domain.tool_format import AnswerText, Ask, Options, ask, read
from agent_svc.domain.tool_prompt import size_of
from agent_svc.run_ports import Model, Prompt, Written
from sluice.errors import Code, SluiceError
from sluice.fault_points import fault_point

CONTEXT_REASONS: Final = frozenset({"CONTEXT_LENGTH", "CONTEXT_LENGTH_EXCEEDED"})
CONTEXT_TRIES: Final = 3
TOTAL_REASON: Final = "TOTAL_TOKENS"  # the budget does not hold the prompt, as it was counted
BYTES_A_TOKEN: Final = 3  # cautious: English has about 4
OUTPUT_TOKENS_MIN: Final = 16  # with less room nothing of use can be written
RETRY_TOKENS_MIN: Final = 64  # of a call after replies that were cut off
READ_INLINE_CHARS: Final = 4096  # longer replies are read in a thread

Publish = Callable[[int, str, bool], Awaitable[bool]]
"""Passes text of a step on: (step, text, whether it replaces what came before); whether all of it
is wanted again."""


def fitting(options: Options, context_tokens: int, output_tokens: int) -> Options:
    """``options`` with as long a prompt as the context leaves beside the output; unchanged when
    the context is not known."""
    if not context_tokens:
        return options
    room = max(context_tokens - output_tokens, context_tokens // 4)
    return replace(options, prompt_bytes=room * BYTES_A_TOKEN)


class BudgetTooSmallError(Exception):
    """What is left of the run's tokens does not hold the next call."""


def prompt_tokens(asked: Ask) -> int:
    """Tokens of a prompt, about; rather too many than too few."""
    tools = sum(
        len(tool.name) + len(tool.description) + len(json.dumps(tool.parameters))
        for tool in asked.tools
    )
    return -(-(size_of(asked.messages) + tools) // BYTES_A_TOKEN)


@dataclass(frozen=True, slots=True)
class Lengths:
    """Most tokens of one reply. ``call``: of one that has to call tools, where their schemas do not
    need more: a text without end in an argument is seen sooner."""

    output: int
    call: int

    def of(self, asked: Ask) -> int:
        """For this call. One that was cut off has all the room once, for arguments that are long,
        then less each time; an answer less at once."""
        if asked.may_answer:
            return self._shorter(asked.cuts)
        if asked.cuts:
            return self._shorter(asked.cuts - 1)
        return min(self.output, max(self.call, asked.call_tokens))

    def _shorter(self, times: int) -> int:
        return min(self.output, max(RETRY_TOKENS_MIN, self.output >> times))


def tokens_of_call(asked: Ask, tokens_left: int, lengths: Lengths) -> int:
    """Most tokens that a call may write. ``tokens_left``: of the run's budget. Raises
    BudgetTooSmallError."""
    most = lengths.of(asked)
    room = tokens_left - prompt_tokens(asked)
    if room < min(most, OUTPUT_TOKENS_MIN):
        raise BudgetTooSmallError
    return min(most, room)


async def model_step(
    task: Task,
    history: History,
    action: CallModel,
    model: Model,
    *,
    options: Options,
    lengths: Lengths,
    publish: Publish,
    interval_s: Callable[[], float],
) -> ModelStep:
    """Makes the call. Raises SluiceError as the scheduler refused it or the model failed.
    BudgetTooSmallError: what is left of the budget does not hold the prompt and an answer."""
    tries = 0
    while True:
        asked = ask(task, history.events, options)
        try:
            most = tokens_of_call(asked, action.tokens_left, lengths)
            return await _once(action, model, asked, most, publish, interval_s)
        except SluiceError as error:
            if error.reason == TOTAL_REASON:
                raise BudgetTooSmallError from None
            tries += 1
            if error.reason not in CONTEXT_REASONS or tries >= CONTEXT_TRIES:
                raise
            options = replace(options, prompt_bytes=max(1, options.prompt_bytes // 2))


async def _once(
    action: CallModel,
    model: Model,
    asked: Ask,
    max_tokens: int,
    publish: Publish,
    interval_s: Callable[[], float],
) -> ModelStep:
    parts: list[str] = []
    written: Written | None = None
    answer = AnswerText(asked)

    async def pass_on(text: str, replaces: bool) -> bool:
        return await publish(action.step, text, replaces)

    fault_point("agent.before_model_call")
    prompt = Prompt(
        asked.messages,
        asked.json_schema,
        asked.tools,
        asked.keep_special_tokens,
        otherwise=asked.again > 0,
    )
    stream = model.generate(
        prompt,
        step=action.step,
        request_id=action.request_id,
        max_tokens=max_tokens,
        total_tokens_max=action.tokens_left,
        deadline_s=action.deadline_s,
    )
    async with contextlib.aclosing(stream), LiveText(pass_on, interval_s) as live:
        async for piece in stream:
            if isinstance(piece, str):
                parts.append(piece)
                live.push(answer.push(piece))
            else:
                written = piece
    if written is None:
        raise SluiceError(Code.INTERNAL, "STREAM_PROTOCOL", "A model call ended without its end.")
    fault_point("agent.after_model_call")
    text = "".join(parts)
    if len(text) > READ_INLINE_CHARS:
        reply = await asyncio.to_thread(read, text, written.finish_reason, asked, action.step)
    else:
        reply = read(text, written.finish_reason, asked, action.step)
    return ModelStep(
        step=action.step,
        message=reply.message,
        prompt_tokens=written.prompt_tokens,
        completion_tokens=written.completion_tokens,
        cost=written.cost,
        request_id=written.request_id or action.request_id,
        cached_tokens=written.cached_tokens,
        problem=reply.problem,
        messages_left_out=asked.messages_left_out,
        cut_off=written.finish_reason == "length",
    )
