"""The tools of the configuration and those that were registered for tenants.

Registered ones are read from the state service, at most every `KEPT_S` seconds per tenant, and
checked again here by the same rules as at their registration: what the store holds grants nothing
by itself. While the service does not answer, what was read up to `STALE_S` ago holds. A declaration
that changed gets a new source; the old one is closed when calls through it are over for sure.

A server of the configuration may remember its callers, so each tenant has a session of its own with
it; the one without a tenant only lists. All that a tenant has here ends with the version of its
record: a deleted tenant leaves nothing to a later one of its name.

A name of the configuration hides a registered one. Runs on the event loop; bounded by
`TENANTS_MAX` tenants, the least recently used first out.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from agent_svc.adapters.tools.factory import Sources, info_from
from agent_svc.adapters.tools.runner import CallLimits, Runner
from agent_svc.domain.authority import grants, owners
from agent_svc.ports import DescribedSource, Tool, ToolError, ToolSource, ToolStatus
from sluice import logs, tool_rules
from sluice.agent.v1.tools_pb2 import ToolDeclaration
from sluice.egress_rules import PrivateRule
from sluice.errors import SluiceError, invalid, unavailable

KEPT_S: Final = 3.0
STALE_S: Final = 300.0
TENANTS_MAX: Final = 256
REGISTERED: Final = "registered"  # label of all registered tools in metrics

log = logs.get(__name__)


class RegisteredTools(Protocol):
    """Declarations of tenants."""

    async def registered(self, tenant: str) -> Sequence[ToolDeclaration]:
        """Those of a tenant, by name. Raises SluiceError."""


@dataclass(slots=True)
class _Entry:
    declaration: ToolDeclaration
    limits: CallLimits
    source: ToolSource | None
    tenant: str = ""
    problem: str = ""


@dataclass(slots=True)
class _Tenant:
    """What one tenant has: ``entries`` that were registered for it, ``sessions`` with servers of
    the configuration."""

    version: int
    entries: dict[str, _Entry] = field(default_factory=dict)
    sessions: dict[str, _Entry] = field(default_factory=dict)
    read_at: float = float("-inf")
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Tools:
    """See ToolBox."""

    def __init__(
        self,
        declarations: Sequence[ToolDeclaration],
        sources: Sources,
        runner: Runner,
        registered: RegisteredTools | None = None,
        registered_private: Sequence[PrivateRule] = (),
        versions: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """``registered_private``: what registered tools may reach beside public addresses.
        ``versions``: of a tenant's record now, which also grows over a deletion; 0: there is none.
        Raises SluiceError INVALID_ARGUMENT naming table and field of a wrong declaration."""
        self._sources = sources
        self._runner = runner
        self._registered = registered
        self._registered_private = registered_private
        self._versions = versions
        self._configured: dict[str, _Entry] = {}
        for index, one in enumerate(declarations):
            tool_rules.check(one, f"tool[{index}]", configured=True)
            if one.name in self._configured:
                raise invalid(f"tool[{index}].name", "is the name of another tool")
            self._configured[one.name] = self._entry(one, "", one.name)
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        self._retired: list[tuple[float, ToolSource]] = []

    async def resolve(self, tenant: str, names: Sequence[str]) -> Sequence[Tool]:
        """See ToolBox."""
        entries = [await self._find(tenant, owner) for owner in owners(names)]
        # Together: one server that does not answer must not hold up the others.
        made = await asyncio.gather(*(self._callable(entry) for entry in entries if entry))
        found = {one.info.name: one for tools in made for one in tools}
        return [one for name, one in found.items() if grants(names, name)]

    async def states(self, tenant: str) -> Sequence[ToolStatus]:
        """See ToolBox."""
        entries = {**await self._own(tenant), **self._configured}
        told = await asyncio.gather(*(self._states_of(entries[name]) for name in sorted(entries)))
        return [status for one in told for status in one]

    async def run(self) -> None:
        """Ends what tenants had that were changed or deleted since, until cancelled."""
        while True:
            await asyncio.sleep(KEPT_S)
            for tenant, held in self._tenants.items():
                self._renew(tenant, held)
            await self._close_retired()

    async def _callable(self, entry: _Entry) -> Sequence[Tool]:
        """Raises SluiceError: a run that was given a tool does not go on as if it had none."""
        try:
            return await self._tools_of(entry)
        except ToolError as error:
            name = entry.declaration.name
            raise unavailable("TOOL_UNAVAILABLE", f"Tool {name}: {error.message}") from None

    async def _states_of(self, entry: _Entry) -> Sequence[ToolStatus]:
        info, problem = info_from(entry.declaration), entry.problem
        if not problem:
            try:
                if isinstance(entry.source, DescribedSource):
                    return await entry.source.states()
                return [ToolStatus(one.info) for one in await self._tools_of(entry)]
            except ToolError as error:
                problem = error.message
        return [ToolStatus(info, problem)]

    async def close(self) -> None:
        """Ends every source."""
        entries = [*self._configured.values()]
        for held in self._tenants.values():
            entries += [*held.entries.values(), *held.sessions.values()]
        retired, self._retired = self._retired, []
        sources = [*(entry.source for entry in entries), *(one for _, one in retired)]
        await asyncio.gather(*(source.close() for source in sources if source is not None))

    async def _tools_of(self, entry: _Entry) -> list[Tool]:
        if entry.source is None:
            raise ToolError("TOOL_UNAVAILABLE", entry.problem, made=False)
        made = await entry.source.tools()
        return [self._runner.wrap(one, entry.limits, entry.tenant) for one in made]

    async def _find(self, tenant: str, owner: str) -> _Entry | None:
        configured = self._configured.get(owner)
        if configured is None:
            return (await self._own(tenant)).get(owner)
        if configured.declaration.WhichOneof("kind") != "mcp":
            return configured  # nothing of a call stays behind for the next one
        sessions = self._held(tenant).sessions
        if owner not in sessions:
            source = self._sources.source(configured.declaration)
            sessions[owner] = replace(configured, source=source, tenant=tenant)
        return sessions[owner]

    def _held(self, tenant: str) -> _Tenant:
        held = self._tenants.setdefault(tenant, _Tenant(self._versions(tenant)))
        self._tenants.move_to_end(tenant)
        self._renew(tenant, held)
        while len(self._tenants) > TENANTS_MAX:
            _, gone = self._tenants.popitem(last=False)
            self._let_go(gone)
        return held

    def _renew(self, tenant: str, held: _Tenant) -> None:
        version = self._versions(tenant)
        if version != held.version:
            self._let_go(held)
            held.version, held.read_at = version, float("-inf")

    def _let_go(self, held: _Tenant) -> None:
        for entry in (*held.entries.values(), *held.sessions.values()):
            self._retire(entry)
        held.entries, held.sessions = {}, {}

    async def _own(self, tenant: str) -> Mapping[str, _Entry]:
        if self._registered is None:
            return {}
        held = self._held(tenant)
        async with held.lock:
            now = asyncio.get_running_loop().time()
            if now - held.read_at >= KEPT_S:
                version = held.version
                try:
                    self._take(tenant, held, await self._registered.registered(tenant))
                    if held.version == version:  # else it may be what the tenant before had
                        held.read_at = now
                except SluiceError:
                    if now - held.read_at > STALE_S:
                        raise
        return held.entries

    def _take(self, tenant: str, held: _Tenant, told: Sequence[ToolDeclaration]) -> None:
        before, held.entries = held.entries, {}
        for one in told:
            known = before.get(one.name)
            if known is not None and known.declaration == one:
                held.entries[one.name] = before.pop(one.name)
            else:
                held.entries[one.name] = self._entry(one, tenant, REGISTERED)
        for entry in before.values():
            self._retire(entry)

    def _entry(self, one: ToolDeclaration, tenant: str, label: str) -> _Entry:
        limits = CallLimits(
            tool_rules.timeout_s(one),
            tool_rules.output_bytes_max(one),
            tool_rules.preview_bytes(one),
            label,
        )
        if tenant:
            try:
                tool_rules.check(one, "tool", configured=False, private=self._registered_private)
            except SluiceError as error:  # stored before a rule, or past it
                log.warning("a registered tool is refused", reason=error.reason)
                return _Entry(one, limits, None, tenant, error.message)
        return _Entry(one, limits, self._sources.source(one, tenant), tenant)

    def _retire(self, entry: _Entry) -> None:
        if entry.source is not None:
            end = asyncio.get_running_loop().time() + entry.limits.timeout_s + KEPT_S
            self._retired.append((end, entry.source))

    async def _close_retired(self) -> None:
        now = asyncio.get_running_loop().time()
        due = [source for end, source in self._retired if end <= now]
        if due:
            self._retired = [one for one in self._retired if one[0] > now]
            await asyncio.gather(*(source.close() for source in due), return_exceptions=True)
