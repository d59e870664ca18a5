"""What callers see when the store refuses or cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sluice.errors import Code, SluiceError, failed_precondition, not_found, unavailable
from state_svc.ports import (
    LimitReachedError,
    NameTakenError,
    ParentMissingError,
    RegistryFullError,
    StoreUnavailableError,
    VersionConflictError,
)

RETRY_AFTER_S: Final = 0.5


def store_unavailable() -> SluiceError:
    """UNAVAILABLE: the store is slow, frozen or gone. What was asked may have happened."""
    return unavailable("STORE_UNAVAILABLE", "The store does not answer now.", RETRY_AFTER_S)


@contextmanager
def store_errors() -> Iterator[None]:
    """Maps what a store raises to what a caller sees."""
    try:
        yield
    except StoreUnavailableError as error:
        raise store_unavailable() from error
    except VersionConflictError as error:
        raise SluiceError(
            Code.ABORTED, "VERSION_CONFLICT", "It was changed since it was read; read it again."
        ) from error
    except RegistryFullError as error:
        raise failed_precondition(
            "REGISTRY_FULL", "There are as many as there may be; delete some first."
        ) from error
    except LimitReachedError as error:
        raise failed_precondition(
            "STORAGE_FULL",
            "The tenant has stored as much as it may; delete some first.",
            metadata={"limit": error.limit},
        ) from error
    except NameTakenError as error:
        raise SluiceError(Code.ALREADY_EXISTS, "ALREADY_EXISTS", "It is in use already.") from error
    except ParentMissingError as error:
        raise not_found("TENANT_UNKNOWN", "There is no such tenant.") from error
