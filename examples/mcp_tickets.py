"""A small MCP server with one tool that reads and one that has an effect.

Over standard input and output: ``python examples/mcp_tickets.py``; over HTTP, at /mcp:
``python examples/mcp_tickets.py --http 8765``. Tickets are kept in a file (``--file``), so that
several processes share them. ``open_ticket`` takes the key that a Sluice agent sends along with
each call: the same key twice opens one ticket.
"""

import argparse
import fcntl
import json
from pathlib import Path
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver import Context
from mcp.server.mcpserver.exceptions import ToolError

KEY = "sluice/idempotency-key"

server = MCPServer("tickets", log_level="WARNING")
arguments = argparse.Namespace(file=Path("tickets.json"), http=0)


def change(key: str, title: str, text: str) -> dict[str, Any]:
    """Adds a ticket, or finds the one that this key has opened; locked against other processes."""
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    with arguments.file.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        tickets: list[dict[str, Any]] = json.loads(file.read() or "[]")
        for ticket in tickets:
            if key and ticket["key"] == key:
                return ticket
        ticket = {"id": len(tickets) + 1, "title": title, "text": text, "key": key}
        file.truncate(0)
        file.write(json.dumps([*tickets, ticket]))
        return ticket


@server.tool()
def find_tickets(word: str) -> list[dict[str, Any]]:
    """Finds the tickets whose title or text has a word, whatever its case."""
    if not arguments.file.exists():
        return []
    tickets: list[dict[str, Any]] = json.loads(arguments.file.read_text() or "[]")
    shown = [{name: ticket[name] for name in ("id", "title", "text")} for ticket in tickets]
    return [one for one in shown if word.lower() in f"{one['title']} {one['text']}".lower()]


@server.tool()
def open_ticket(title: str, text: str, context: Context) -> dict[str, Any]:
    """Opens a ticket and returns its number."""
    if not title.strip():
        raise ToolError("a ticket needs a title")
    key = str((context.request_context.meta or {}).get(KEY, ""))
    return {"id": change(key, title, text)["id"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--file", type=Path, default=arguments.file)
    parser.add_argument("--http", type=int, metavar="PORT", default=0)
    parser.parse_args(namespace=arguments)
    if arguments.http:
        server.run("streamable-http", host="127.0.0.1", port=arguments.http)
    else:
        server.run()
