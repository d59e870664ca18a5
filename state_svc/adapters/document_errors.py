"""What callers see when documents, their chunks or a search are refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sluice.errors import (
    Code,
    SluiceError,
    exhausted,
    failed_precondition,
    invalid,
    not_found,
    unavailable,
)
from state_svc.adapters.matrix_index import BUSY_RETRY_S
from state_svc.adapters.store_errors import store_errors
from state_svc.document_ports import (
    ChunksMissingError,
    CollectionUnknownError,
    DocumentDeletedError,
    GenerationReplacedError,
    IndexLoadingError,
    IndexTooLargeError,
    SearchBusyError,
    VectorLengthError,
)


@contextmanager
def document_errors() -> Iterator[None]:
    """Maps what stores and index raise to what a caller sees."""
    try:
        with store_errors():
            yield
    except GenerationReplacedError as error:
        raise SluiceError(
            Code.ABORTED,
            "GENERATION_REPLACED",
            "There is a later generation, or the document is gone.",
        ) from error
    except CollectionUnknownError as error:
        raise unknown_collection() from error
    except DocumentDeletedError as error:
        raise not_found(
            "DOCUMENT_UNKNOWN", "The document of this request was deleted since."
        ) from error
    except ChunksMissingError as error:
        raise failed_precondition(
            "CHUNKS_MISSING", "The generation has not the chunks that it is said to have."
        ) from error
    except VectorLengthError as error:
        raise invalid("vector", f"the collection's vectors have {error.dims} dimensions") from error
    except IndexLoadingError as error:
        raise unavailable(
            "INDEX_LOADING", "The collection is being read; ask again.", error.retry_after_s
        ) from error
    except IndexTooLargeError as error:
        raise failed_precondition(
            "INDEX_TOO_LARGE", "The collection is larger than the memory for searches."
        ) from error
    except SearchBusyError as error:
        raise exhausted("SEARCH_BUSY", "Too many searches are running.", BUSY_RETRY_S) from error


def unknown() -> SluiceError:
    """Of a document."""
    return not_found("DOCUMENT_UNKNOWN", "There is no such document.")


def unknown_collection() -> SluiceError:
    """Of a collection."""
    return not_found("COLLECTION_UNKNOWN", "There is no such collection: nothing is in it.")
