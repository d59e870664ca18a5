"""Which models there are, by the names clients use.

Reads the fleet watch; a model stays known while discovery knows an address of it, so that a
restarting engine is UNAVAILABLE and not NOT_FOUND. Synchronous; no state of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from scheduler_svc.adapters.alias_table import AliasTable
from scheduler_svc.adapters.fleet_watch import FleetWatch
from scheduler_svc.adapters.tenant import Tenant
from sluice.errors import SluiceError, failed_precondition, not_found, unavailable
from sluice.inference.v1 import inference_pb2
from sluice.scheduler.v1 import generate_pb2

SHOWN_CHARS_MAX: Final = 64
"""Of an unknown model's name, in the refusal's message; its metadata has the whole."""


class Catalog:
    """Resolves and lists models."""

    def __init__(
        self,
        fleet: FleetWatch,
        default_model: str,
        default_embedding_model: str,
        aliases: AliasTable,
    ) -> None:
        self._fleet = fleet
        self._default = {False: default_model, True: default_embedding_model}
        self.aliases = aliases

    def serves(self, model: str) -> bool:
        """Whether an instance that is known serves the model."""
        return model in self._known()

    def work_of(self, model: str) -> tuple[bool, bool] | None:
        """Whether a model generates, and embeds. ``None``: no known instance serves it."""
        described = self._known().get(model)
        if described is None:
            return None
        return described.capabilities.generate, described.capabilities.embed

    def resolve(self, name: str, tenant: Tenant, *, embeds: bool = False) -> str:
        """The served model for a request. NOT_FOUND for a model that is unknown or not the
        tenant's, alike; FAILED_PRECONDITION for one that does not do what is asked; UNAVAILABLE
        for one that is unknown while an instance has not said yet what it serves."""
        known = self._known()
        resolved = name or self._default[embeds] or self._first(known.values(), embeds)
        alias = self.aliases.get(resolved)
        if alias is not None:
            # By its own name, or because every version of it is permitted.
            versions = (target.model for target in alias.targets)
            if not (tenant.may_use(resolved) or all(map(tenant.may_use, versions))):
                raise _unknown(resolved)
            resolved = self.aliases.pick(alias, known.__contains__)
        elif resolved and not tenant.may_use(resolved):
            raise _unknown(resolved)
        if not resolved:
            raise unavailable("NO_INSTANCE", "no instance has reported a model yet", 1.0)
        return self._able(resolved, embeds, known)

    def granted(
        self, name: str, tenant: Tenant, models: Sequence[str], *, embeds: bool = False
    ) -> str:
        """The served model for a call of a run that may call ``models``: served names and no
        aliases, so that a run keeps its model. Without a name the first that does what is asked.
        Errors as of :meth:`resolve`; also for one that is not the tenant's any more."""
        if not name:
            works = ((model, self.work_of(model)) for model in models)
            able = (model for model, work in works if work is not None and work[embeds])
            name = next(able, self._default[embeds])
            if name not in models and not self._fleet.knows_all:
                raise _not_said_yet()
        if name not in models or not self._permits(tenant, name):
            raise _unknown(name or ", ".join(models))
        return self._able(name, embeds, self._known())

    def _permits(self, tenant: Tenant, model: str) -> bool:
        """By its own name, or by that of an alias that may point at it."""
        return tenant.may_use(model) or any(
            tenant.may_use(name) and any(target.model == model for target in alias.targets)
            for name, alias in self.aliases.all().items()
        )

    def _able(
        self, resolved: str, embeds: bool, known: Mapping[str, inference_pb2.GetModelResponse]
    ) -> str:
        model = known.get(resolved)
        if model is None:
            if resolved == self._default[embeds]:
                return resolved  # configured, not up yet: the queue decides
            if not self._fleet.knows_all:
                raise _not_said_yet()
            raise _unknown(resolved)
        able = model.capabilities.embed if embeds else model.capabilities.generate
        if not able:
            verb = "embed" if embeds else "generate"
            raise failed_precondition("MODEL_CAPABILITY", f"model {resolved} does not {verb}")
        return resolved

    def default_embedding(self, tenant: Tenant) -> str:
        """The model with which the tenant's documents are embedded; empty: there is none."""
        try:
            return self.resolve("", tenant, embeds=True)
        except SluiceError:
            return ""

    def context_tokens(self, model: str) -> int:
        """Tokens of prompt and output together that a served model takes; 0: not known."""
        described = self._known().get(model)
        return 0 if described is None else described.context_tokens

    def list(self, tenant: Tenant) -> list[generate_pb2.Model]:
        """The models that a tenant may use, by name."""
        models: dict[str, generate_pb2.Model] = {}
        aliases: dict[str, list[str]] = {}
        for name, alias in sorted(self.aliases.all().items()):
            for target in alias.targets:
                aliases.setdefault(target.model, []).append(name)
        for instance, described in self._fleet.models.items():
            names = aliases.get(described.model, ())
            if not any(map(tenant.may_use, (described.model, *names))):
                continue
            model = models.get(described.model)
            if model is None:
                model = models[described.model] = _entry(described)
                model.is_default = described.model in self._defaults()
                model.aliases.extend(names)
            load = self._fleet.reports.get(instance)
            if load is not None and load.serving and self._fleet.is_fresh(instance):
                model.instances += 1
                model.available = True
        return [models[name] for name in sorted(models)]

    def _known(self) -> dict[str, inference_pb2.GetModelResponse]:
        return {described.model: described for described in self._fleet.models.values()}

    def _defaults(self) -> set[str]:
        known = self._known().values()
        return {self._default[embeds] or self._first(known, embeds) for embeds in (False, True)}

    @staticmethod
    def _first(models: Iterable[inference_pb2.GetModelResponse], embeds: bool) -> str:
        names = [
            described.model
            for described in models
            if (described.capabilities.embed if embeds else described.capabilities.generate)
        ]
        return min(names, default="")


def _entry(described: inference_pb2.GetModelResponse) -> generate_pb2.Model:
    return generate_pb2.Model(
        name=described.model,
        generates=described.capabilities.generate,
        embeds=described.capabilities.embed,
        context_tokens=described.context_tokens,
        simulated=described.simulated,
        engine=described.engine,
        embedding_dimensions=described.embedding_dimensions,
    )


def _not_said_yet() -> SluiceError:
    return unavailable(
        "NO_INSTANCE",
        "no instance that has answered serves the model, and some have not yet",
        1.0,
    )


def _unknown(name: str) -> SluiceError:
    # The client's own word, so cut, quoted, and with what does not print escaped.
    shown = ascii(name if len(name) <= SHOWN_CHARS_MAX else f"{name[:SHOWN_CHARS_MAX]}...")
    return not_found(
        "MODEL_UNKNOWN",
        f"no such model for this tenant: {shown}",
        metadata={"model": name},
        field="model",
    )
