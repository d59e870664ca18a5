"""Records histories of runs, with what is decided after each event: `python -m
tests.unit.agent.record_histories`. To be run when decisions change on purpose, together with a new
number in agent_svc/domain/next_action.py (DECISIONS)."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from agent_svc.adapters import translate
from agent_svc.domain.history import fold
from agent_svc.domain.model import Budget, Choice, Decision, Message, Resumed, RunId, Task
from agent_svc.domain.next_action import DECISIONS, next_action
from agent_svc.run_ports import Phase, TaskSpec
from sluice.clock import run_virtual
from sluice.errors import exhausted
from sluice.scheduler.v1 import runs_pb2
from tests.unit.agent.world import TOOLS, WIDE, Run, World, answer, calls

FOLDER = Path(__file__).resolve().parents[2] / "data" / "histories"


def plain(value: object) -> object:
    """A decision as JSON has it; a value says of which class it is."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"is": type(value).__name__, **fields}
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value


def decide(document: Mapping[str, Any]) -> list[object]:
    """What is decided after each event of a recorded history, a second later; after the last that
    waits for a person also with the recorded decision, and for the last but one with a cancel."""
    task = _task(document["task"])
    stored = [
        json_format.ParseDict(one, runs_pb2.RunEvent()).SerializeToString()
        for one in document["events"]
    ]
    events = [translate.read_event(number, data) for number, data in enumerate(stored, 1)]
    decided: list[object] = []
    for count in range(1, len(events)):
        history = fold(events[:count])
        now_s = history.last_s + 1
        decided.append(plain(next_action(task, history, now_s)))
        if history.waiting is not None:
            for decision in Decision:
                resumed = Resumed(history.waiting.step, decision, '"r"')
                decided.append(plain(next_action(task, history, now_s, decision=resumed)))
        decided.append(plain(next_action(task, history, now_s, is_cancelled=True)))
    return decided


def _task(values: Mapping[str, Any]) -> Task:
    return Task(
        run_id=RunId(values["run_id"]),
        messages=tuple(Message("user", text) for text in values["messages"]),
        tools=tuple(TOOLS[name] for name in values["tools"]),
        choice=Choice[values["choice"]],
        budget=Budget(**values["budget"]),
        create_s=values["create_s"],
        turn=values["turn"],
    )


def document_of(run: Run) -> dict[str, Any]:
    """A run as it is recorded."""
    assert run.spec is not None
    work = run.spec.work
    assert isinstance(work, TaskSpec)
    events = [translate.event_message(run.run_id, event) for event in run.events]
    document: dict[str, Any] = {
        "decisions": DECISIONS,
        "task": {
            "run_id": run.run_id,
            "messages": [message.content for message in work.messages],
            "tools": list(work.tools),
            "choice": work.choice.name,
            "budget": dataclasses.asdict(run.spec.budget),
            "create_s": run.create_s,
            "turn": work.turn,
        },
        "events": [json_format.MessageToDict(event) for event in events],
    }
    document["decided"] = decide(document)
    return document


# --- The runs -----------------------------------------------------------------------------------


async def parallel(world: World) -> Run:
    """Two calls side by side, an answer."""
    world.script.replies = [calls(("find", {"n": 1}), ("put", {"n": 2})), answer("done")]
    return world.run()


async def in_doubt(world: World) -> Run:
    """A once call whose agent dies; retried by a person."""
    world.script.replies = [calls(("pay", {"n": 1})), answer("done")]
    world.script.tool_s = 4.0
    run = world.run()
    first = world.agent()
    await world.until(lambda: world.script.effects["r1:2"] == 1)
    await first.crash()
    world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    world.state.resume(run, Resumed(2, Decision.RETRY))
    return run


async def approval(world: World) -> Run:
    """Two calls, one to be approved; skipped."""
    world.script.replies = [calls(("sign", {"n": 1}), ("find", {"n": 2})), answer("done")]
    run = world.run()
    world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    world.state.resume(run, Resumed(2, Decision.SKIP))
    return run


async def wrong(world: World) -> Run:
    """Replies that cannot be used, three times."""
    world.script.replies = ["{", answer("no calls yet"), "[]"]
    return world.run(choice=Choice.REQUIRED)


async def repeated(world: World) -> Run:
    """The same call again and again, beside others."""
    world.script.replies = [
        calls(("find", {"n": 1}), ("find", {"n": 10 + number})) for number in range(9)
    ]
    return world.run()


async def declined(world: World) -> Run:
    """A call that a person declined, and that is asked for once more."""
    sign = calls(("sign", {"n": 1}))
    world.script.replies = [sign, sign, "done"]
    run = world.run()
    world.agent()
    await world.until(lambda: run.phase is Phase.WAITING)
    world.state.resume(run, Resumed(2, Decision.SKIP))
    return run


async def budgets(world: World) -> Run:
    """A loop that uses its steps up, with a pause in between."""
    numbers = [calls(("find", {"n": number})) for number in range(9)]
    world.script.replies = [numbers[0], exhausted("QUEUE_FULL", "Busy.", 30.0), *numbers[1:]]
    return world.run(budget=replace(WIDE, steps_max=9))


async def turn(world: World) -> Run:
    """A turn of a session."""
    world.state.sessions["s"] = [Message("user", "Hi"), Message("assistant", "Ho")]
    world.script.replies = ["Hello again."]
    return world.run(tools=(), turn=True, session="s")


async def cancelled(world: World) -> Run:
    """Cancelled in the middle of a call."""
    world.script.replies = [calls(("put", {"n": 1}))]
    world.script.tool_s = 60.0
    run = world.run()
    world.agent()
    await world.until(lambda: world.script.effects["r1:2"] == 1)
    world.state.cancel(run)
    return run


RUNS: tuple[Callable[[World], Awaitable[Run]], ...] = (
    parallel,
    in_doubt,
    approval,
    wrong,
    repeated,
    declined,
    budgets,
    turn,
    cancelled,
)


def record(make: Callable[[World], Awaitable[Run]]) -> dict[str, Any]:
    """Plays a run and records it."""

    async def scenario() -> dict[str, Any]:
        world = World()
        try:
            run = await make(world)
            if not world.agents:
                world.agent()
            await world.until_ended(run)
            await asyncio.sleep(0)
            return document_of(run)
        finally:
            await world.close()

    return run_virtual(scenario())


def text_of(document: Mapping[str, Any]) -> str:
    """A history as it is stored."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for one in RUNS:
        (FOLDER / f"{one.__name__}.json").write_text(text_of(record(one)))
