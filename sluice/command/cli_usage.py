"""`sluice usage`: what this key's tenant used, by hour and model."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer
from rich.table import Table

from sluice.command.cli_support import (
    ConfigOption,
    EndpointOption,
    KeyFileOption,
    open_client,
    print_table,
)

HOURS_MAX = 31 * 24


def add_usage(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(usage)


def usage(
    hours: Annotated[
        int, typer.Option(help="How far to look back, in hours.", min=1, max=HOURS_MAX)
    ] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print the records as JSON.")] = False,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Show requests, tokens, engine seconds and cost of this key's tenant, by hour (UTC) and model.
    What ended within the last second or two may be missing."""
    from google.protobuf import json_format

    end_s = time.time()
    with open_client(config, endpoint, key_file) as client:
        records = client.usage(end_s - hours * 3600, end_s)
    if as_json:
        documents = [
            json_format.MessageToDict(
                record, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
            )
            for record in records
        ]
        typer.echo(json.dumps(documents, ensure_ascii=False, indent=2))
        return
    table = Table("hour", "model", "requests", "ended as", box=None, pad_edge=False)
    for name in ("prompt", "cached", "output", "engine s", "cost"):
        table.add_column(name, justify="right")
    for record in records:
        hour = time.strftime("%Y-%m-%d %H:00", time.gmtime(record.begin_time.seconds))
        ends = sorted(record.requests.items(), key=lambda end: -end[1])
        table.add_row(
            hour,
            record.model,
            str(sum(record.requests.values())),
            ", ".join(f"{count} {outcome}" for outcome, count in ends),
            str(record.prompt_tokens),
            str(record.cached_tokens),
            str(record.completion_tokens),
            f"{record.gpu_seconds:.1f}",
            f"{record.cost:.6g}",
        )
    print_table(table)
