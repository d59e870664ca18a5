"""What runs need of tools, and tools of the world. The rest of a run's world: run_ports.py.

Every method may wait for the network, ends within its own bounded time, and can be cancelled.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from agent_svc.domain.model import ToolInfo

Embed = Callable[[Sequence[str], float], Awaitable[Sequence[bytes]]]
"""Texts and seconds to a vector each, as little-endian float32. Raises SluiceError."""


@dataclass(frozen=True, slots=True)
class ToolContext:
    """Under what a call is made. ``deadline_s``: seconds that are left to it; the tool's own
    timeout holds besides. ``traceparent``: of the run's span, or empty. ``embed``: embeds under
    the run's credential; None where no model is at hand."""

    tenant: str
    run_id: str
    idempotency_key: str
    deadline_s: float
    traceparent: str = ""
    embed: Embed | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call gave, as JSON. A tool gives it whole. What a run gets may be a preview: then
    ``truncated`` is set, ``content_json`` is a JSON string with the beginning of the result, and
    ``blob`` names the stored whole of ``size_bytes``; an empty name says that it was not kept."""

    content_json: str
    truncated: bool = False
    blob: str = ""
    size_bytes: int = 0


class ToolError(Exception):
    """A call failed. ``reason`` is one of docs/ERRORS.md and ``message`` a fixed text that the
    model and the client may see. ``made``: whether the call may have had its effect and nobody
    said so; a failure that the tool itself told is not. ``content_json``: what the tool said of
    it, as JSON of at most 4 KiB, for the model only and never for logs."""

    def __init__(self, reason: str, message: str, *, made: bool, content_json: str = "") -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.made = made
        self.content_json = content_json


class Blobs(Protocol):
    """Large results."""

    async def put(
        self, tenant: str, owner: str, name: str, content: bytes, *, deadline_s: float
    ) -> None:
        """Stores a blob of at most 4 MiB under its name; the same name replaces it. Raises
        SluiceError."""


@dataclass(frozen=True, slots=True)
class ChunkFound:
    """A chunk of a document: the bytes of the document that it covers, and its scores, larger
    being better; ``vector_score`` is a cosine."""

    document_id: str
    begin_byte: int
    end_byte: int
    text: str
    score: float
    vector_score: float


class ChunkSearch(Protocol):
    """The tenant's documents."""

    async def search(
        self,
        tenant: str,
        collection: str,
        query: str,
        vector: bytes,
        top_k: int,
        *,
        deadline_s: float,
    ) -> Sequence[ChunkFound]:
        """Best first; an unknown collection has none. Raises SluiceError."""


class Tool(Protocol):
    """A tool that a run may call."""

    @property
    def info(self) -> ToolInfo:
        """What the model and the rules know of it."""

    async def call(self, arguments: dict[str, Any], context: ToolContext) -> ToolResult:
        """Makes one call with arguments that fit its schema. Raises ToolError. A cancel ends the
        call at once."""


@dataclass(frozen=True, slots=True)
class ToolStatus:
    """A tool and how it is; ``problem`` says why it cannot be called, empty when it can."""

    info: ToolInfo
    problem: str = ""


class ToolSource(Protocol):
    """The tools of one declaration: one, or those of a server or document."""

    async def tools(self) -> Sequence[Tool]:
        """What can be called now. Raises ToolError TOOL_UNAVAILABLE."""

    async def close(self) -> None:
        """Ends connections and processes. Idempotent."""


@runtime_checkable
class DescribedSource(ToolSource, Protocol):
    """A source that also knows what cannot be called, and why."""

    async def states(self) -> Sequence[ToolStatus]:
        """All its tools, within seconds."""


class Rights(Protocol):
    """What tenants' runs may use now."""

    def tools(self, tenant: str) -> Collection[str] | None:
        """Names of tools and of what they belong to; ``None``: not known yet."""


class ToolBox(Protocol):
    """The tools of the configuration and those that tenants registered."""

    async def resolve(self, tenant: str, names: Sequence[str]) -> Sequence[Tool]:
        """The tools of these names, in their order; a name of a server or document stands for all
        its tools. One that does not exist (any more) is left out: a call of it is told to the
        model as unknown. Raises SluiceError UNAVAILABLE where one exists and cannot be had now
        (TOOL_UNAVAILABLE), and where the tenant's own cannot be read."""

    async def states(self, tenant: str) -> Sequence[ToolStatus]:
        """All tools of the configuration and of the tenant, by name."""
