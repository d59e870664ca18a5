"""`sluice explain REQUEST_ID`: why a request waited, landed where it did, or was refused."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from sluice.command.cli_support import ConfigOption, EndpointOption, KeyFileOption, open_client


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
    requests that were refused, failed, moved or slow, and a sample of the others."""
    from google.protobuf import json_format

    from sluice.command.explanation import story
    from sluice.command.log_files import printable

    with open_client(config, endpoint, key_file) as client:
        record = client.decision(request_id)
    if as_json:
        document = json_format.MessageToDict(
            record, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
        return
    for line in story(record):
        typer.echo(printable(line))
