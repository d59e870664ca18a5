"""What callers see when the store refuses or cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from sluice.errors import (
    Code,
    SluiceError,
    exhausted,
    failed_precondition,
    invalid,
    not_found,
    unavailable,
)
from state_svc.domain.run_values import (
    LeaseLostError,
    LimitError,
    NotWaitingError,
    RunFullError,
    RunsFullError,
    RunUnknownError,
    SessionBusyError,
    SessionFullError,
    SessionsFullError,
    SessionUnknownError,
    TooManyRunsError,
)
from state_svc.ports import (
    LimitReachedError,
    NameTakenError,
    ParentMissingError,
    RegistryFullError,
    RequestIdReusedError,
    StoreFullError,
    StoreUnavailableError,
    TenantBeingDeletedError,
    TenantDeletedError,
    VersionConflictError,
)

RETRY_AFTER_S: Final = 0.5
FULL_RETRY_S: Final = 10.0  # runs and sessions end by themselves
BUSY_RETRY_S: Final = 1.0
STORE_FULL_RETRY_S: Final = 10.0  # what has a time to live goes, or somebody deletes
PURGE_RETRY_S: Final = 5.0  # a purge takes 10 s, or as long as a store is away


def store_unavailable() -> SluiceError:
    """UNAVAILABLE: the store is slow, frozen or gone. What was asked may have happened."""
    return unavailable("STORE_UNAVAILABLE", "The store does not answer now.", RETRY_AFTER_S)


def _run_error(error: Exception) -> SluiceError:
    """What callers see of a refusal in ``state_svc/domain/run_values.py``."""
    match error:
        case RunUnknownError():
            return not_found("RUN_UNKNOWN", "There is no such run.")
        case SessionUnknownError():
            return not_found("SESSION_UNKNOWN", "There is no such session.")
        case SessionBusyError():
            return SluiceError(
                Code.ABORTED,
                "SESSION_BUSY",
                "A run has the session's turn.",
                retry_after_s=BUSY_RETRY_S,
            )
        case LeaseLostError():
            return SluiceError(
                Code.ABORTED, "LEASE_LOST", "The run is not held under this token any more."
            )
        case NotWaitingError():
            return failed_precondition("NOT_WAITING", "The run does not wait at this step.")
        case TooManyRunsError():
            return exhausted(
                "TOO_MANY_RUNS", "The tenant has as many open runs as it may have.", FULL_RETRY_S
            )
        case LimitError():
            return _full(error)
    raise error


def _full(error: LimitError) -> SluiceError:
    metadata = {"limit": error.limit}
    match error:
        case RunFullError():
            return failed_precondition(
                "RUN_FULL", "The run is at a bound; it can only be ended.", metadata=metadata
            )
        case SessionFullError():
            return failed_precondition(
                "SESSION_FULL", "The session is at a bound.", metadata=metadata
            )
        case RunsFullError():
            text = "The tenant's runs are at a bound."
            retry_s = error.retry_ms / 1000 or FULL_RETRY_S
            return exhausted("RUNS_FULL", text, retry_s, metadata=metadata)
        case SessionsFullError():
            text = "The tenant's sessions are at a bound."
            return exhausted("SESSIONS_FULL", text, FULL_RETRY_S, metadata=metadata)
    raise error


_RUN_ERRORS: Final = (
    RunUnknownError,
    SessionUnknownError,
    SessionBusyError,
    LeaseLostError,
    NotWaitingError,
    TooManyRunsError,
    LimitError,
)


@contextmanager
def store_errors() -> Iterator[None]:
    """Maps what a store raises to what a caller sees."""
    try:
        yield
    except StoreFullError as error:
        raise exhausted(
            "STORE_FULL", "The store's memory is full; nothing was done.", STORE_FULL_RETRY_S
        ) from error
    except StoreUnavailableError as error:
        raise store_unavailable() from error
    except VersionConflictError as error:
        raise SluiceError(
            Code.ABORTED, "VERSION_CONFLICT", "It was changed since it was read; read it again."
        ) from error
    except RequestIdReusedError as error:
        raise invalid("request_id", "was used for another request") from error
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
    except TenantBeingDeletedError as error:
        raise SluiceError(
            Code.FAILED_PRECONDITION,
            "TENANT_BEING_DELETED",
            "What belonged to a deleted tenant of this name is not gone yet.",
            retry_after_s=PURGE_RETRY_S,
        ) from error
    except (ParentMissingError, TenantDeletedError) as error:
        raise not_found("TENANT_UNKNOWN", "There is no such tenant.") from error
    except _RUN_ERRORS as error:
        raise _run_error(error) from error
