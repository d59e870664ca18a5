"""An MCP server over standard input and output that does what a test wants, also what no server
should. Standard library only, so that it starts in an instant; protocol 2025-11-25.

``python mcp_scripted.py LOG [stubborn]``: LOG gets a line of JSON for each message that comes in.
A stubborn one ignores SIGTERM and the end of its input, and has a child that does, too.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

OBJECT: dict[str, Any] = {"type": "object", "properties": {}}
TOOLS = (
    "echo",
    "again",
    "error",
    "rpc_error",
    "sleep",
    "huge",
    "junk",
    "long_line",
    "crash",
    "ask",
    "blocks",
    "structured",
    "change",
    "whisper",
    "invalid",
    "remember",
)
PIXEL = "iVBORw0KGgo="
STUBBORN_CHILD = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print(1, flush=True)\ntime.sleep(120)"
)
log = Path(sys.argv[1])
listed = [{"name": name, "description": f"Does {name}.", "inputSchema": OBJECT} for name in TOOLS]
remembered: list[dict[str, Any]] = []  # as long as this process lives
asked: dict[str, list[Any]] = {}  # answers to requests of this server, by call


def send(message: dict[str, Any]) -> None:
    print(json.dumps({"jsonrpc": "2.0"} | message), flush=True)


def note(message: dict[str, Any]) -> None:
    with log.open("a") as file:
        file.write(json.dumps(message) + "\n")


def text(*lines: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": line} for line in lines]}


def blocks() -> dict[str, Any]:
    link = {"type": "resource_link", "uri": "file:///a.txt", "name": "a"}
    inner = {"uri": "file:///b.txt", "text": "inside", "mimeType": "text/plain"}
    return {
        "content": [
            {"type": "text", "text": "look:"},
            {"type": "image", "data": PIXEL, "mimeType": "image/png"},
            link,
            {"type": "resource", "resource": inner},
        ]
    }


def call(number: Any, name: str, arguments: dict[str, Any], meta: dict[str, Any]) -> None:
    result: dict[str, Any] = {}
    match name:
        case "echo":
            result = text(json.dumps({"arguments": arguments, "meta": meta}))
        case "again":
            result = text(str(time.time()))
        case "error":
            result = text("no such ticket: 7") | {"isError": True}
        case "rpc_error":
            send({"id": number, "error": {"code": -32602, "message": "title is missing"}})
            return
        case "sleep":
            return
        case "huge":
            result = text("x" * int(arguments["bytes"]))
        case "junk":
            print("Hello! I am a banner.\n{\n", flush=True)
            result = text("after the junk")
        case "long_line":
            sys.stdout.write("y" * int(arguments["bytes"]))
            sys.stdout.flush()
            return
        case "crash":
            os._exit(3)
        case "ask":
            asked[str(number)] = []
            sample = {"messages": [], "maxTokens": 1}
            form = {"message": "?", "requestedSchema": OBJECT}
            send({"id": f"{number}/s", "method": "sampling/createMessage", "params": sample})
            send({"id": f"{number}/e", "method": "elicitation/create", "params": form})
            send({"id": f"{number}/r", "method": "roots/list"})
            return
        case "blocks":
            result = blocks()
        case "structured":
            result = text('{"a": [1, 2]}') | {"structuredContent": {"a": [1, 2]}}
        case "change":
            listed.append({"name": "later", "inputSchema": OBJECT})
            send({"method": "notifications/tools/list_changed"})
            result = text("changed")
        case "whisper":
            print(arguments["secret"], file=sys.stderr, flush=True)
            result = text("whispered")
        case "remember":
            remembered.append(arguments)
            result = text(json.dumps(remembered))
        case "invalid":
            send({"id": number, "result": {"content": "not a list"}})
            return
    send({"id": number, "result": result})


def answered(message: dict[str, Any]) -> None:
    """An answer to a request of this server."""
    number, _, _ = str(message["id"]).partition("/")
    asked[number].append("error" in message)
    if len(asked[number]) == 3:
        send({"id": int(number), "result": text(json.dumps(asked[number]))})


def handle(message: dict[str, Any]) -> None:
    note(message)
    method, number = message.get("method"), message.get("id")
    if method == "initialize":
        info = {"name": "scripted", "version": "1"}
        changing = {"tools": {"listChanged": True}}
        result = {"protocolVersion": "2025-11-25", "capabilities": changing, "serverInfo": info}
        send({"id": number, "result": result})
    elif method == "tools/list":
        send({"id": number, "result": {"tools": listed}})
    elif method == "tools/call":
        params = message["params"]
        call(number, params["name"], params.get("arguments", {}), params.get("_meta", {}))
    elif method is None:
        answered(message)
    elif number is not None:
        send({"id": number, "error": {"code": -32601, "message": "no such method"}})


def main() -> None:
    stubborn = "stubborn" in sys.argv
    pids = [os.getpid()]
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, "-c", STUBBORN_CHILD], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        pids.append(child.pid)
    note({"pids": pids, "environment": dict(os.environ)})
    for line in sys.stdin:
        handle(json.loads(line))
    while stubborn:
        time.sleep(1)


if __name__ == "__main__":
    main()
