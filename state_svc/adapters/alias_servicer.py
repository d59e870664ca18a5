"""``AliasService``: where aliases point, with a bounded history for rollback."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Final

from sluice.errors import Code, SluiceError, failed_precondition, invalid, not_found
from sluice.state.v1 import aliases_pb2, aliases_pb2_grpc
from state_svc.adapters import stored
from state_svc.adapters.registry_watch import RegistryWatch
from state_svc.adapters.store_errors import store_errors
from state_svc.domain.names import check_model
from state_svc.ports import Kind, Record, RegistryStore, VersionConflictError

TARGETS_MAX: Final = 32
WEIGHT_MAX: Final = 1_000_000
EARLIER_MAX: Final = 16
ATTEMPTS_MAX: Final = 5  # writes of others that one change may meet


class AliasServicer(aliases_pb2_grpc.AliasServiceServicer):
    """See the proto. A change is read, made, and written if nobody wrote in between."""

    def __init__(self, store: RegistryStore, watch: RegistryWatch) -> None:
        self._store, self._watch = store, watch

    async def SetAlias(
        self, request: aliases_pb2.SetAliasRequest, context: Any
    ) -> aliases_pb2.SetAliasResponse:
        """Points an alias."""
        check_model(request.alias, "alias")
        _check_targets(request.targets)
        expected = request.expected_version if request.HasField("expected_version") else None

        def change(alias: aliases_pb2.Alias | None) -> aliases_pb2.Alias:
            version = 0 if alias is None else alias.version
            if expected is not None and expected != version:
                raise SluiceError(
                    Code.ABORTED, "VERSION_CONFLICT", "The alias is at another version."
                )
            made = aliases_pb2.Alias(name=request.alias, targets=request.targets)
            if alias is not None:
                made.earlier.append(aliases_pb2.AliasTargets(targets=alias.targets))
                made.earlier.extend(alias.earlier[: EARLIER_MAX - 1])
            return made

        return aliases_pb2.SetAliasResponse(alias=await self._change(request.alias, change))

    async def RollbackAlias(
        self, request: aliases_pb2.RollbackAliasRequest, context: Any
    ) -> aliases_pb2.RollbackAliasResponse:
        """Takes the last change back."""
        check_model(request.alias, "alias")

        def change(alias: aliases_pb2.Alias | None) -> aliases_pb2.Alias:
            if alias is None:
                raise not_found("ALIAS_UNKNOWN", "There is no such alias.")
            if not alias.earlier:
                raise failed_precondition("NOTHING_EARLIER", "The alias has no earlier targets.")
            return aliases_pb2.Alias(
                name=alias.name, targets=alias.earlier[0].targets, earlier=alias.earlier[1:]
            )

        return aliases_pb2.RollbackAliasResponse(alias=await self._change(request.alias, change))

    async def DeleteAlias(
        self, request: aliases_pb2.DeleteAliasRequest, context: Any
    ) -> aliases_pb2.DeleteAliasResponse:
        """Deletes an alias."""
        check_model(request.alias, "alias")
        with store_errors():
            if not await self._store.delete(Kind.ALIASES, request.alias):
                raise not_found("ALIAS_UNKNOWN", "There is no such alias.")
        self._watch.poke()
        return aliases_pb2.DeleteAliasResponse()

    async def WatchAliases(
        self, request: aliases_pb2.WatchAliasesRequest, context: Any
    ) -> AsyncIterator[aliases_pb2.WatchAliasesResponse]:
        """Streams everything, then changes."""
        async for change in self._watch.follow((Kind.ALIASES,)):
            yield aliases_pb2.WatchAliasesResponse(
                snapshot=change.snapshot,
                aliases=[
                    alias
                    for record in change.put[Kind.ALIASES].values()
                    if (alias := _alias(record)) is not None
                ],
                deleted_aliases=change.deleted[Kind.ALIASES],
            )

    async def _change(self, name: str, change: Any) -> aliases_pb2.Alias:
        with store_errors():
            for attempt in range(1, ATTEMPTS_MAX + 1):
                known = (await self._store.read(Kind.ALIASES)).records.get(name)
                made: aliases_pb2.Alias = change(None if known is None else _alias(known))
                try:
                    made.version = await self._store.put(
                        Kind.ALIASES,
                        name,
                        made.SerializeToString(),
                        expected=0 if known is None else known.version,
                    )
                except VersionConflictError:
                    if attempt == ATTEMPTS_MAX:
                        raise
                    continue
                self._watch.poke()
                return made
        raise AssertionError("unreachable")


def _alias(record: Record) -> aliases_pb2.Alias | None:
    alias = stored.read(aliases_pb2.Alias, record)
    if alias is not None:
        alias.version = record.version
    return alias


def _check_targets(targets: Sequence[aliases_pb2.AliasTarget]) -> None:
    if not 1 <= len(targets) <= TARGETS_MAX:
        raise invalid("targets", f"must be 1 to {TARGETS_MAX}")
    if len({target.model for target in targets}) < len(targets):
        raise invalid("targets", "a model occurs twice")
    for number, target in enumerate(targets):
        check_model(target.model, f"targets[{number}].model")
        if not 1 <= target.weight <= WEIGHT_MAX:
            raise invalid(f"targets[{number}].weight", f"must be 1 to {WEIGHT_MAX}")
