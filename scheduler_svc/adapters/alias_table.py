"""Aliases by name: those of the configuration, and over them those of the state service.

An alias that the state service has is only what that says; one that is deleted there is what the
configuration says again. Synchronous; one event loop. Which version a request gets: a counter per
alias, so that any ``total weight`` requests in a row are shared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from scheduler_svc.domain.aliases import Alias, Target, pick


class AliasTable:
    """See the module's docstring. ``configured``: alias to model."""

    def __init__(self, configured: Mapping[str, str]) -> None:
        self._configured = {
            name: Alias(name, (Target(model, 1),), version=0) for name, model in configured.items()
        }
        self._stored: dict[str, Alias] = {}
        self._counts: dict[str, int] = {}

    def get(self, name: str) -> Alias | None:
        """The alias of that name."""
        return self._stored.get(name) or self._configured.get(name)

    def configured(self, name: str) -> Alias | None:
        """What the configuration says, unless the state service says something else."""
        return None if name in self._stored else self._configured.get(name)

    def all(self) -> dict[str, Alias]:
        """Every alias by name."""
        return self._configured | self._stored

    def pick(self, alias: Alias, served: Callable[[str], bool]) -> str:
        """The model for the next request by this alias. A version that nobody serves gives its
        share to the heaviest that somebody does."""
        count = self._counts[alias.name] = self._counts.get(alias.name, -1) + 1
        chosen = pick(alias, count)
        if served(chosen):
            return chosen
        heaviest = sorted(alias.targets, key=lambda target: -target.weight)
        return next((target.model for target in heaviest if served(target.model)), chosen)

    def change(
        self, aliases: Iterable[Alias], removed: Iterable[str] = (), *, snapshot: bool = False
    ) -> None:
        """What the state service says: everything, or what changed."""
        if snapshot:
            self._stored.clear()
        for name in removed:
            self._stored.pop(name, None)
        for alias in aliases:
            self._stored[alias.name] = alias
        for name in self._counts.keys() - self.all().keys():
            del self._counts[name]
