"""`sluice explain REQUEST_ID`: why a request waited, landed where it did, or was refused."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from sluice.command.cli_support import (
    ConfigOption,
    EndpointOption,
    KeyFileOption,
    open_client,
    own_command,
)
from sluice.errors import SluiceError

if TYPE_CHECKING:
    from sluice.command.client import MeshClient
    from sluice.scheduler.v1 import records_pb2


def add_explain(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(explain)


def explain(
    request_id: Annotated[
        str, typer.Argument(help="The request's identifier: x-request-id, or request_id.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the record as JSON.")] = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Explain one request of this key's tenant: its wait, its placements, its end. Kept for a day:
    requests that were refused, failed, moved or slow, and a sample of the others. For a run:
    `sluice agent show`."""
    from google.protobuf import json_format

    from sluice.command.explanation import story
    from sluice.command.log_files import printable

    with open_client(config, endpoint, key_file) as client:
        record = _record(client, request_id)
    if as_json:
        document = json_format.MessageToDict(
            record, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
        return
    for line in story(record):
        typer.echo(printable(line))


def _record(client: MeshClient, request_id: str) -> records_pb2.DecisionRecord:
    """Raises SluiceError, which says so where the identifier is that of a run."""
    from sluice.scheduler.v1 import runs_pb2

    try:
        return client.decision(request_id)
    except SluiceError as error:
        if error.reason != "DECISION_UNKNOWN":
            raise
        unknown = error
    try:
        client.call("GetRun", runs_pb2.GetRunRequest(run_id=request_id))
    except SluiceError:
        raise unknown from None
    text = f"this is a run, not a request: {own_command('agent', 'show', request_id)}"
    raise SluiceError(unknown.code, unknown.reason, text)
