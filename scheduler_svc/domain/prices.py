"""What tokens cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

PER: Final = 1e6


@dataclass(frozen=True, slots=True)
class Price:
    """Of a million tokens, in the deployment's currency."""

    prompt: float = 0.0
    output: float = 0.0


_FREE: Final = Price()


class Prices:
    """Prices by model; a model without one costs nothing."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """From ``model=prompt_per_million:output_per_million`` each; ValueError names a bad one."""
        self._prices: dict[str, Price] = {}
        for entry in entries:
            model, equals, text = entry.rpartition("=")
            prompt, colon, output = text.partition(":")
            try:
                price = Price(float(prompt), float(output))
            except ValueError:
                price = None
            if not (model and equals and colon and price) or not _sane(price):
                raise ValueError(f"{entry!r} is not of the form model=1.5:6, both 0 or more")
            if model in self._prices:
                raise ValueError(f"{model} has two prices")
            self._prices[model] = price

    def cost(self, model: str, prompt_tokens: int, output_tokens: int) -> float:
        """What so many tokens cost."""
        price = self._prices.get(model, _FREE)
        return (prompt_tokens * price.prompt + output_tokens * price.output) / PER


def _sane(price: Price) -> bool:
    return 0 <= price.prompt <= PER and 0 <= price.output <= PER  # also refuses NaN
