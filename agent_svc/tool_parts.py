"""Puts the tools of the process together: their declarations, connections and limits."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import grpc.aio

from agent_svc.adapters.egress import EgressGuard
from agent_svc.adapters.state_tools import StateTools
from agent_svc.adapters.toolbox import Tools
from agent_svc.adapters.tools.factory import Sources
from agent_svc.adapters.tools.mcp_servers import McpServers
from agent_svc.adapters.tools.runner import Runner
from sluice.agent.v1.tools_pb2 import ToolDeclaration
from sluice.config import ConfigError
from sluice.egress_rules import PrivateRule
from sluice.errors import SluiceError
from sluice.telemetry import Telemetry
from sluice.telemetry_names import EGRESS_REFUSALS
from sluice.tool_declarations import parse

TOOLS_MAX = 256  # [[tool]] tables


class ToolParts:
    """All that tools need; one per process. ``path``: of sluice.toml; ``state``: a channel to the
    state service, which the caller closes; ``folder``: what relative paths count from, unset: the
    file's own folder; ``registered_private``: what registered tools may reach besides;
    ``versions``: as of Tools."""

    def __init__(
        self,
        path: Path | None,
        state: grpc.aio.Channel,
        telemetry: Telemetry,
        environ: Mapping[str, str],
        folder: Path | None = None,
        registered_private: Sequence[PrivateRule] = (),
        versions: Callable[[str], int] = lambda _: 0,
    ) -> None:
        """Raises ConfigError naming table and field of a wrong declaration."""
        self._guard = EgressGuard()
        telemetry.counter(
            EGRESS_REFUSALS,
            lambda: [(n, {"rule": rule.value}) for rule, n in self._guard.refusals.items()],
        )
        store = StateTools(state)
        root = (folder or (path.parent if path is not None else Path())).absolute()
        self._mcp = McpServers(self._guard, environ, root, registered_private)
        sources = Sources(
            self._guard,
            store,
            environ=environ,
            root=root,
            mcp=self._mcp.server,
            registered_private=registered_private,
        )
        try:
            self.box = Tools(
                declared(path),
                sources,
                Runner(store, telemetry),
                store,
                registered_private,
                versions,
            )
        except SluiceError as error:
            wrong = error.fields[0]
            raise ConfigError(wrong.field, wrong.description) from None

    async def close(self) -> None:
        """Ends connections, threads and processes of tools."""
        await self.box.close()
        await self._mcp.close()
        self._guard.close()


def declared(path: Path | None) -> Sequence[ToolDeclaration]:
    """The [[tool]] tables of the configuration. Raises ConfigError."""
    if path is None:
        return ()
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", [])
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"is not TOML: {error}") from error
    if not isinstance(tables, list) or len(tables) > TOOLS_MAX:
        raise ConfigError("tool", f"must be at most {TOOLS_MAX} tables [[tool]]")
    found = []
    for index, table in enumerate(tables):
        if not isinstance(table, Mapping):
            raise ConfigError(f"tool[{index}]", "must be a table")
        found.append(parse(table, f"tool[{index}]"))
    return found
