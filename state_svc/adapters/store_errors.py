"""What callers see when the store cannot be used."""

from __future__ import annotations

from typing import Final

from sluice.errors import SluiceError, unavailable

RETRY_AFTER_S: Final = 0.5


def store_unavailable() -> SluiceError:
    """UNAVAILABLE: the store is slow, frozen or gone. What was asked may have happened."""
    return unavailable("STORE_UNAVAILABLE", "The store does not answer now.", RETRY_AFTER_S)
