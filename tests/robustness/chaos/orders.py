"""One order: what its run is asked, what the model answers, and what must have come of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from sluice.scheduler.v1 import runs_pb2

STEPS = 4
"""Model calls of a run: charge, mail, charge, answer."""


@dataclass
class Order:
    """An order and its run. `request_id` is kept: asking again starts nothing twice."""

    name: str
    request_id: str
    run_id: str = ""
    """Empty: not acknowledged."""
    events: dict[int, runs_pb2.RunEvent] = field(default_factory=dict)
    decided: list[str] = field(default_factory=list)
    """What was decided for the mail in doubt, if it was."""

    @property
    def charges(self) -> tuple[str, str]:
        """What is charged, in this order."""
        return f"{self.name}-deposit", f"{self.name}-rest"

    @property
    def answer(self) -> str:
        """The answer."""
        return f"{self.name} is done"

    @property
    def ended(self) -> bool:
        """Whether its last event was seen."""
        return any(event.HasField("ended") for event in self.events.values())

    @property
    def waiting(self) -> runs_pb2.RunWaiting | None:
        """What it waits for a person for, by the events seen."""
        last = self.events[max(self.events)] if self.events else None
        return last.waiting if last is not None and last.HasField("waiting") else None

    def request(self) -> runs_pb2.RunAgentRequest:
        """Starts its run in the background."""
        deposit, rest = self.charges
        replies = [
            {"tool": "charge", "arguments": {"order": deposit}},
            {"tool": "mail", "arguments": {"order": self.name}},
            {"tool": "charge", "arguments": {"order": rest}},
            {"answer": self.answer},
        ]
        script = json.dumps({"replies": replies})
        return runs_pb2.RunAgentRequest(
            task=f"Work off {self.name}. [[sim: {script}]]",
            tools=["charge", "mail"],
            request_id=self.request_id,
            background=True,
        )
