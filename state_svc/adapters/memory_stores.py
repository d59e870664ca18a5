"""Registry, usage and decisions in this process's memory: twins of the real stores for tests and
simulation. Their clock is the event loop's. Nothing survives the process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from state_svc.adapters.valkey_ledger import BATCH_KEPT_S, DECISION_KEPT_S, DECISIONS_MAX
from state_svc.deletion_ports import Deletion, DeletionState
from state_svc.ports import (
    CHILDREN_BYTES_MAX,
    CHILDREN_MAX,
    RECORDS_MAX,
    Kind,
    NameTakenError,
    ParentMissingError,
    Record,
    RegistryFullError,
    Snapshot,
    TenantBeingDeletedError,
    UsageKey,
    VersionConflictError,
)


class MemoryRegistry:
    """A :class:`state_svc.ports.RegistryStore`, and its ``deletion_ports.DeletionMarks``."""

    def __init__(self) -> None:
        self._marks: dict[str, Deletion] = {}
        self._last_deletion = 0
        self._records: dict[Kind, dict[str, Record]] = {kind: {} for kind in Kind}
        self._unique: dict[Kind, dict[str, str]] = {kind: {} for kind in Kind}
        self._revisions: dict[Kind, int] = dict.fromkeys(Kind, 0)

    async def put(
        self,
        kind: Kind,
        name: str,
        value: bytes,
        *,
        expected: int | None = None,
        unique: Sequence[str] = (),
    ) -> int:
        """See :class:`state_svc.ports.RegistryStore`."""
        self._check(kind, name, expected)
        parent = name.partition("/")[0]
        if kind in (Kind.KEYS, Kind.TOOLS) and parent not in self._records[Kind.TENANTS]:
            raise ParentMissingError
        new = name not in self._records[kind]
        marks = self._marks if kind is Kind.TENANTS else {}
        mark = marks.get(name) if new else None
        if mark is not None and mark.state is DeletionState.PURGING:
            raise TenantBeingDeletedError
        held = len(self._records[kind]) + len(marks) - (mark is not None)
        if new and held >= RECORDS_MAX[kind]:
            raise RegistryFullError
        self._check_children(kind, name, value)
        if any(self._unique[kind].get(one, name) != name for one in unique):
            raise NameTakenError
        if mark is not None:
            self._marks[name] = Deletion(mark.number, DeletionState.RETURNING)
        self._unique[kind].update(dict.fromkeys(unique, name))
        self._revisions[kind] += 1
        self._records[kind][name] = Record(self._revisions[kind], value)
        return self._revisions[kind]

    async def delete(self, kind: Kind, name: str, *, expected: int | None = None) -> bool:
        """See :class:`state_svc.ports.RegistryStore`."""
        self._check(kind, name, expected)
        if name not in self._records[kind]:
            return False
        self._forget(kind, [name])
        if kind is Kind.TENANTS:
            self._last_deletion = max(self._last_deletion + 1, _now_ms())
            self._marks[name] = Deletion(self._last_deletion, DeletionState.PURGING)
            for children in (Kind.KEYS, Kind.TOOLS):
                records = self._records[children]
                self._forget(children, [one for one in records if one.startswith(name + "/")])
        return True

    async def find(self, kind: Kind, unique: str) -> str | None:
        """See :class:`state_svc.ports.RegistryStore`."""
        return self._unique[kind].get(unique)

    async def read(self, kind: Kind) -> Snapshot:
        """See :class:`state_svc.ports.RegistryStore`."""
        return Snapshot(self._revisions[kind], dict(self._records[kind]))

    async def children(self, kind: Kind, parent: str) -> Mapping[str, Record]:
        """See :class:`state_svc.ports.RegistryStore`."""
        prefix = parent + "/"
        return {
            name.removeprefix(prefix): record
            for name, record in self._records[kind].items()
            if name.startswith(prefix)
        }

    async def revisions(self, kinds: Sequence[Kind]) -> list[int]:
        """See :class:`state_svc.ports.RegistryStore`."""
        return [self._revisions[kind] for kind in kinds]

    async def deletions(self) -> tuple[int, Mapping[str, Deletion]]:
        """See :class:`state_svc.deletion_ports.DeletionMarks`."""
        return _now_ms(), dict(self._marks)

    async def deletion(self, name: str) -> Deletion | None:
        """See :class:`state_svc.deletion_ports.DeletionMarks`."""
        return self._marks.get(name)

    async def mark(self, name: str, known: Deletion, state: DeletionState | None) -> bool:
        """See :class:`state_svc.deletion_ports.DeletionMarks`."""
        if self._marks.get(name) != known:
            return False
        if state is None:
            del self._marks[name]
        else:
            self._marks[name] = Deletion(known.number, state)
        return True

    def _check(self, kind: Kind, name: str, expected: int | None) -> None:
        known = self._records[kind].get(name)
        if expected is not None and expected != (0 if known is None else known.version):
            raise VersionConflictError

    def _check_children(self, kind: Kind, name: str, value: bytes) -> None:
        if kind not in CHILDREN_MAX:
            return
        prefix = name.partition("/")[0] + "/"
        others = [
            # As the real store counts it: with its version.
            len(record.value) + len(str(record.version)) + 1
            for other, record in self._records[kind].items()
            if other.startswith(prefix) and other != name
        ]
        if len(others) >= CHILDREN_MAX[kind] or sum(others) + len(value) > CHILDREN_BYTES_MAX[kind]:
            raise RegistryFullError

    def _forget(self, kind: Kind, names: Sequence[str]) -> None:
        for name in names:
            del self._records[kind][name]
        owners = self._unique[kind]
        self._unique[kind] = {one: name for one, name in owners.items() if name not in names}
        if names:
            self._revisions[kind] += 1


class MemoryUsage:
    """A :class:`state_svc.ports.UsageStore`. Hours are never dropped. ``since``: by name, the first
    hour that the tenant of today may see."""

    def __init__(self) -> None:
        self.since: dict[str, int] = {}
        self._batches: dict[tuple[str, str], float] = {}
        self._amounts: dict[str, dict[UsageKey, dict[str, float]]] = {}

    async def append(
        self, tenant: str, batch_id: str, amounts: Mapping[UsageKey, Mapping[str, float]]
    ) -> bool:
        """See :class:`state_svc.ports.UsageStore`."""
        now = _now()
        if self._batches.get((tenant, batch_id), 0.0) > now:
            return False
        self._batches[tenant, batch_id] = now + BATCH_KEPT_S
        ledger = self._amounts.setdefault(tenant, {})
        for key, names in amounts.items():
            sums = ledger.setdefault(key, {})
            for name, amount in names.items():
                sums[name] = sums.get(name, 0.0) + amount
        return True

    async def query(
        self, tenant: str, begin_hour: int, end_hour: int, *, earlier: bool = False
    ) -> Mapping[UsageKey, Mapping[str, float]]:
        """See :class:`state_svc.ports.UsageStore`."""
        ledger = self._amounts.get(tenant, {})
        first = begin_hour if earlier else max(begin_hour, self.since.get(tenant, 0))
        return {key: dict(sums) for key, sums in ledger.items() if first <= key.hour < end_hour}


class MemoryDecisions:
    """A :class:`state_svc.ports.DecisionStore`."""

    def __init__(self, kept_s: float = DECISION_KEPT_S, decisions_max: int = DECISIONS_MAX) -> None:
        self._kept_s, self._max = kept_s, decisions_max
        self._records: dict[str, dict[str, tuple[float, bytes]]] = {}

    async def put(self, tenant: str, decisions: Mapping[str, bytes]) -> None:
        """See :class:`state_svc.ports.DecisionStore`."""
        kept = self._records.setdefault(tenant, {})
        for request_id, record in decisions.items():
            kept.pop(request_id, None)
            kept[request_id] = (_now() + self._kept_s, record)
        for request_id in list(kept)[: max(len(kept) - self._max, 0)]:
            del kept[request_id]

    def forget(self, tenant: str) -> None:
        """Takes all of one tenant away."""
        self._records.pop(tenant, None)

    async def get(self, tenant: str, request_id: str) -> bytes | None:
        """See :class:`state_svc.ports.DecisionStore`."""
        until, record = self._records.get(tenant, {}).get(request_id, (0.0, b""))
        return record if until > _now() else None


def _now_ms() -> int:
    return int(_now() * 1000)


def _now() -> float:
    return asyncio.get_running_loop().time()
