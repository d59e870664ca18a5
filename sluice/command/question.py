"""The question that a fresh mesh is asked, through Envoy, as any client would.

Failure modes: a mesh that answers UNAVAILABLE is asked again for a while, since a scheduler learns
of its instances shortly after they serve; everything else is the caller's to report.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from sluice.command.client import MeshClient
from sluice.command.failures import UnreachableError
from sluice.common.v1 import sampling_pb2
from sluice.errors import Code, SluiceError
from sluice.scheduler.v1 import generate_pb2

QUESTION: Final = "What is the capital of France?"
ANSWER_TOKENS_MAX: Final = 64
TIMEOUT_S: Final = 120.0
AGAIN_FOR_S: Final = 30.0
AGAIN_PAUSE_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    text: str
    model: str
    instance: str
    simulated: bool
    seconds: float
    completion_tokens: int


def ask(client: MeshClient, on_text: Callable[[str], None]) -> Answer:
    """Asks and hands the text to `on_text` as it comes. Raises SluiceError or UnreachableError."""
    until = time.monotonic() + AGAIN_FOR_S
    while True:
        try:
            return _ask_once(client, on_text)
        except SluiceError as error:
            if error.code is not Code.UNAVAILABLE or time.monotonic() >= until:
                raise
        except UnreachableError:
            if time.monotonic() >= until:
                raise
        time.sleep(AGAIN_PAUSE_S)


def _ask_once(client: MeshClient, on_text: Callable[[str], None]) -> Answer:
    began = time.monotonic()
    request = generate_pb2.GenerateRequest(
        prompt=QUESTION,
        sampling=sampling_pb2.SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS_MAX),
    )
    started = generate_pb2.GenerateStarted()
    finished = generate_pb2.GenerateFinished()
    text: list[str] = []
    for message in client.generate(request, TIMEOUT_S):
        match message.WhichOneof("event"):
            case "started":
                started = message.started
            case "delta":
                text.append(message.delta.text)
                on_text(message.delta.text)
            case "finished":
                finished = message.finished
    return Answer(
        text="".join(text),
        model=started.model,
        instance=finished.instance,
        simulated=finished.simulated or started.simulated,
        seconds=time.monotonic() - began,
        completion_tokens=finished.usage.completion_tokens,
    )
