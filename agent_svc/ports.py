"""What a run needs from the world: its store, the model, tools and time.

Every method may wait for the network, ends within its own bounded time, and can be cancelled.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_svc.domain.model import Message, ToolInfo


@dataclass(frozen=True, slots=True)
class ToolContext:
    """Under what a call is made. ``deadline_s``: seconds that are left to it, at most the tool's
    own timeout. ``traceparent``: of the run's span, or empty."""

    tenant: str
    run_id: str
    idempotency_key: str
    deadline_s: float
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave: JSON as text, whole, at most the tool's output limit."""

    content_json: str


class ToolError(Exception):
    """A call failed. ``reason`` is one of docs/ERRORS.md and ``message`` a fixed text that the
    model and the client may see. ``made``: whether the call may have had its effect."""

    def __init__(self, reason: str, message: str, *, made: bool) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.made = made


class Tool(Protocol):
    """A tool that a run may call."""

    @property
    def info(self) -> ToolInfo:
        """What the model and the rules know of it."""

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """Makes one call with arguments that fit its schema. Raises ToolError. A cancel ends the
        call at once."""


class ToolBox(Protocol):
    """The tools of the configuration and those that tenants registered."""

    async def resolve(self, tenant: str, names: Sequence[str]) -> Sequence[Tool]:
        """The tools of these names, in their order; a name of a server or document stands for all
        its tools. One that does not exist (any more) is left out: a call of it is told to the
        model as unknown."""


@dataclass(frozen=True, slots=True)
class Written:
    """The end of a model call."""

    text: str
    finish_reason: str  # "stop" or "length"
    prompt_tokens: int
    completion_tokens: int
    cost: float
    request_id: str


class Model(Protocol):
    """The models behind the scheduler's mesh API, for one run."""

    def generate(
        self,
        messages: Sequence[Message],
        *,
        step: int,
        json_schema: str = "",
        tools: Sequence[ToolInfo] = (),
        max_tokens: int | None = None,
        deadline_s: float,
    ) -> AsyncIterator[str | Written]:
        """Text as it comes, then the end. Raises SluiceError as the scheduler refused or failed;
        its retry delay is honest. Closing it cancels the call."""

    async def embed(self, texts: Sequence[str], *, deadline_s: float) -> Sequence[bytes]:
        """A vector for each text, as little-endian float32. Raises SluiceError."""
