"""`sluice docs`: puts files into a collection, lists, reads and searches them, takes them out.

A document's identifier is its path below the folder that was named, so that adding the same folder
again replaces what is there. Files are stored and made searchable a few at a time.
"""

from __future__ import annotations

import re
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.command.cli_support import (
    EXIT_FAILED,
    ConfigOption,
    EndpointOption,
    JsonOption,
    KeyFileOption,
    counted,
    errors,
    fail_line,
    open_client,
    output,
    print_json,
    print_table,
)
from sluice.command.doc_files import (
    MEDIA_TYPES,
    Found,
    UnfitFileError,
    content_of,
    find_files,
)
from sluice.command.failures import UnreachableError, one_line
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from sluice.command.client import MeshClient
    from sluice.scheduler.v1 import data_pb2

AT_ONCE: Final = 4
INGEST_S: Final = 600.0
_LABEL: Final = re.compile(r"([^=]+)=(.*)")

CollectionArgument = Annotated[
    str, typer.Argument(help="The collection: [A-Za-z0-9_-], 1 to 64 characters.")
]
LabelOption = Annotated[
    list[str] | None, typer.Option(help="name=value; repeatable.", show_default=False)
]

docs_app: Final = typer.Typer(
    help="Documents that runs and searches find things in, by collection.", no_args_is_help=True
)


@docs_app.command()
def add(
    collection: CollectionArgument,
    paths: Annotated[list[Path], typer.Argument(help="Files and folders.")],
    label: LabelOption = None,
    wait: Annotated[bool, typer.Option(help="Wait until they can be found.")] = True,
    timeout: Annotated[
        float, typer.Option(help="How long to wait for one document, in s.", min=1.0)
    ] = INGEST_S,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Add files to a collection, those of folders too: text, Markdown and HTML, by their suffix.
    What is there under the same name is replaced. Exit status 1 when any failed."""
    labels = labels_of(label)
    files = list(find_files(paths))
    if not files:
        raise typer.BadParameter(f"nothing to add: suffixes are {', '.join(MEDIA_TYPES)}")
    failed = 0
    with open_client(config, endpoint, key_file) as client, _workers() as pool:
        done = [
            pool.submit(_add, client, collection, one, labels, timeout if wait else 0.0)
            for one in files
        ]
        names = dict(zip(done, files, strict=True))
        for number, result in enumerate(as_completed(done), start=1):
            counted = f"{number} of {len(files)}  {names[result].document_id}"
            try:
                output().print(Text(f"{counted}: {result.result()}"), soft_wrap=True)
            except (SluiceError, UnreachableError, UnfitFileError, OSError) as error:
                failed += 1
                why = one_line(error) if isinstance(error, SluiceError) else str(error)
                fail_line(f"{counted}: {why}")
    output().print(f"{len(files) - failed} added, {failed} failed")
    if failed:
        raise typer.Exit(EXIT_FAILED)


@docs_app.command("list")
def list_documents(
    collection: CollectionArgument,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """List the documents of a collection."""
    with open_client(config, endpoint, key_file) as client:
        found = list(_documents(client, collection))
    if as_json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("document", "type", "bytes", "chunks", "ready", "stored (UTC)", "labels"):
        table.add_column(column, overflow="fold", no_wrap=column == "document")
    for one in found:
        table.add_row(
            Text(one.document_id),
            Text(one.media_type.removeprefix("text/")),
            str(one.size_bytes),
            str(one.chunk_count),
            "yes" if one.ready else "no",
            one.update_time.ToDatetime().strftime("%Y-%m-%d %H:%M:%S"),
            Text(", ".join(f"{name}={value}" for name, value in sorted(one.labels.items()))),
        )
    print_table(table)


@docs_app.command()
def collections(
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """List the collections of this key's tenant."""
    with open_client(config, endpoint, key_file) as client:
        found = list(_collections(client))
    if as_json:
        print_json(found)
        return
    table = Table(box=None, pad_edge=False)
    for column in ("collection", "documents", "chunks", "bytes of chunks"):
        table.add_column(column, overflow="fold", no_wrap=column == "collection")
    for one in found:
        counts = (one.document_count, one.chunk_count, one.chunk_bytes)
        table.add_row(Text(one.collection), *map(str, counts))
    print_table(table)


@docs_app.command()
def get(
    collection: CollectionArgument,
    document: Annotated[str, typer.Argument(help="The document, as `list` names it.")],
    to: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write. Default: print it.")
    ] = None,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Print what a document holds, or write it to a file."""
    from sluice.command.log_files import printable
    from sluice.scheduler.v1 import data_pb2

    request = data_pb2.GetDocumentRequest(
        collection=collection, document_id=document, with_content=True
    )
    with open_client(config, endpoint, key_file) as client:
        content = client.call("GetDocument", request).content
    if to is not None:
        to.write_bytes(content)
    elif sys.stdout.isatty():
        output().print(Text(printable(content.decode(errors="replace"))), soft_wrap=True)
    else:
        typer.echo(content.decode(), nl=False)  # always UTF-8


@docs_app.command()
def search(
    collection: CollectionArgument,
    query: Annotated[str, typer.Argument(help="The question; - reads standard input.")],
    top_k: Annotated[int, typer.Option(help="Passages wanted.", min=1, max=100)] = 5,
    label: LabelOption = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Find passages by meaning and by words, best first. The score puts them in order; how near one
    is, its cosine and the score of its words (BM25) say."""
    from sluice.command.log_files import printable
    from sluice.scheduler.v1 import data_pb2

    request = data_pb2.SearchDocumentsRequest(
        collection=collection,
        query=sys.stdin.read() if query == "-" else query,
        top_k=top_k,
        labels=labels_of(label),
    )
    with open_client(config, endpoint, key_file) as client:
        hits = client.call("SearchDocuments", request).hits
    if as_json:
        print_json(hits)
        return
    for hit in hits:
        where = f"{hit.document_id}, bytes {hit.begin_byte} to {hit.end_byte}"
        near = f"cosine {hit.vector_score:.3f}, words {hit.term_score:.2f}"
        output().print(Text(f"{hit.score:.4f}  {where}  ({near})", style="bold"), soft_wrap=True)
        output().print(Text(printable(hit.text.strip()) + "\n"), soft_wrap=True)
    if not hits:
        errors().print("nothing was found")


@docs_app.command("rm")
def remove(
    collection: CollectionArgument,
    documents: Annotated[
        list[str] | None,
        typer.Argument(help="Documents, as `list` names them.", show_default=False),
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All documents, and so the collection.")
    ] = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Delete documents with all that belongs to them."""
    from sluice.scheduler.v1 import data_pb2

    if everything == bool(documents):
        raise typer.BadParameter("name documents, or say --all")
    with open_client(config, endpoint, key_file) as client:
        if everything:
            count = _delete_all(client, collection)
            gone = f"{counted(count, 'document')} {'is' if count == 1 else 'are'} deleted"
            output().print(Text(f"{collection}: {gone}"), soft_wrap=True)
        for name in documents or ():
            request = data_pb2.DeleteDocumentRequest(collection=collection, document_id=name)
            client.call("DeleteDocument", request)
            output().print(Text(f"{name} is deleted"), soft_wrap=True)


def labels_of(entries: Sequence[str] | None) -> dict[str, str]:
    """name=value each. Raises BadParameter."""
    labels = {}
    for entry in entries or ():
        found = _LABEL.fullmatch(entry)
        if found is None:
            raise typer.BadParameter(f"{entry!r} must be name=value", param_hint="--label")
        labels[found[1]] = found[2]
    return labels


@contextmanager
def _workers() -> Iterator[ThreadPoolExecutor]:
    """Threads for a few files at once. When the block is left early (Ctrl-C) no further file is
    begun, and nobody waits for those that are: they end with the connection."""
    pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="docs")
    try:
        yield pool
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _add(
    client: MeshClient, collection: str, file: Found, labels: dict[str, str], wait_s: float
) -> str:
    """Stores one file and waits for its ingest; what became of it, in words."""
    from sluice.command import run_watch
    from sluice.scheduler.v1 import data_pb2, runs_pb2
    from sluice.status import from_status

    request = data_pb2.PutDocumentRequest(
        collection=collection,
        document_id=file.document_id,
        content=content_of(file),
        media_type=file.media_type,
        labels=labels,
        request_id=str(uuid.uuid4()),
    )
    put = client.call("PutDocument", request)
    if not wait_s:
        return f"stored; run {put.run_id} makes it searchable"
    for event in run_watch.watch(client, put.run_id, 0, wait_s):
        if event.HasField("ended") and event.ended.state != runs_pb2.RUN_STATE_SUCCEEDED:
            raise from_status(event.ended.status)
    where = data_pb2.GetDocumentRequest(collection=collection, document_id=file.document_id)
    document: data_pb2.Document = client.call("GetDocument", where).document
    return counted(document.chunk_count, "chunk")


def _delete_all(client: MeshClient, collection: str) -> int:
    """Deletes what is in a collection now; how many documents that were."""
    from sluice.scheduler.v1 import data_pb2

    request = data_pb2.DeleteCollectionRequest(collection=collection)
    count = 0
    while True:
        done: data_pb2.DeleteCollectionResponse = client.call("DeleteCollection", request)
        count += done.deleted
        if not done.next_page_token:
            return count
        request.page_token = done.next_page_token


def _collections(client: MeshClient) -> Iterator[data_pb2.Collection]:
    from sluice.scheduler.v1 import data_pb2

    request = data_pb2.ListCollectionsRequest(page_size=100)
    while True:
        page = client.call("ListCollections", request)
        yield from page.collections
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token


def _documents(client: MeshClient, collection: str) -> Iterator[data_pb2.Document]:
    from sluice.scheduler.v1 import data_pb2

    request = data_pb2.ListDocumentsRequest(collection=collection, page_size=100)
    while True:
        page = client.call("ListDocuments", request)
        yield from page.documents
        if not page.next_page_token:
            return
        request.page_token = page.next_page_token
