"""Sessions in Redis or Valkey: one script per operation, on the server's own time. Keys:
``session_rules.lua``. A crash of this process before or after a script leaves nothing half done; an
operation whose answer was lost is repeated with its request id and answered as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from state_svc.adapters.valkey_link import Argument, Script, ValkeyLink, text
from state_svc.adapters.valkey_runs import checked
from state_svc.domain.asked import asked_to_append, asked_to_create
from state_svc.domain.run_values import SessionLimits, SessionPage, SessionRecord

_FILES: Final = ("tenant_guard.lua", "session_rules.lua", "sessions.lua")
_SCRIPT: Final = Script(*_FILES)
_DELETION: Final = Script(*_FILES, frees=True)
_ANY_VERSION: Final = -1


class ValkeySessions:
    """A :class:`state_svc.run_ports.SessionStore`. ``clock_ms`` is a test's own time."""

    def __init__(self, link: ValkeyLink, limits: SessionLimits | None = None) -> None:
        self._link = link
        self._limits = limits or SessionLimits()
        self.clock_ms = 0  # 0: the server's

    async def create(
        self, tenant: str, session_id: str, request_id: str, ttl_ms: int, messages: Sequence[bytes]
    ) -> SessionRecord:
        """See :class:`state_svc.run_ports.SessionStore`."""
        name, fields = await self._run(
            tenant,
            "create",
            session_id,
            request_id,
            asked_to_create(ttl_ms, messages),
            ttl_ms,
            self._limits.sessions_max,
            *self._bounds(),
            *messages,
        )
        return _record(text(name), fields)

    async def get(
        self, tenant: str, session_id: str, first: int, size: int
    ) -> tuple[SessionRecord, Sequence[bytes]]:
        """See :class:`state_svc.run_ports.SessionStore`."""
        fields, messages = await self._run(tenant, "get", session_id, first, size)
        return _record(session_id, fields), messages

    async def page(self, tenant: str, size: int, *, before: int = 0) -> SessionPage:
        """See :class:`state_svc.run_ports.SessionStore`."""
        last, found = await self._run(tenant, "list", size, before)
        return SessionPage(tuple(_record(text(name), fields) for name, fields in found), last)

    async def append(
        self,
        tenant: str,
        session_id: str,
        messages: Sequence[bytes],
        expected_version: int | None,
        request_id: str,
    ) -> SessionRecord:
        """See :class:`state_svc.run_ports.SessionStore`."""
        (fields,) = await self._run(
            tenant,
            "append",
            session_id,
            _ANY_VERSION if expected_version is None else expected_version,
            request_id,
            asked_to_append(messages, expected_version),
            *self._bounds(),
            *messages,
        )
        return _record(session_id, fields)

    async def delete(self, tenant: str, session_id: str) -> None:
        """See :class:`state_svc.run_ports.SessionStore`."""
        await self._run(tenant, "delete", session_id)

    def _bounds(self) -> tuple[int, int, int]:
        limits = self._limits
        return limits.messages_max, limits.session_bytes_max, limits.tenant_bytes_max

    async def _run(self, tenant: str, op: str, *arguments: Argument) -> Sequence[Any]:
        words: list[Argument] = [op, self.clock_ms, 0, *arguments]
        script = _DELETION if op == "delete" else _SCRIPT
        return checked(await self._link.script(script, [f"sluice:{{{tenant}}}:sessions"], words))


def _record(session_id: str, fields: Sequence[Any]) -> SessionRecord:
    """From the fields of S_ROW in ``session_rules.lua``."""
    version, count, size, create, update, expire = (int(field) for field in fields[:6])
    return SessionRecord(session_id, version, count, size, create, update, expire, text(fields[6]))
