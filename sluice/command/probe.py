"""Asks a process whether it serves; also the health check of containers.

`python -m sluice.command.probe grpc HOST:PORT`, `... http URL` and `... ping HOST:PORT` (a PING in
Redis's protocol) exit with 0 when it does. Blocking; each question opens a connection of its own,
so that no backoff of an earlier one delays it. Failure modes: everything that is not a clear yes is
a no.
"""

from __future__ import annotations

import os
import socket
import sys
import urllib.error
import urllib.request
from enum import Enum
from typing import Final

import grpc
from grpc_health.v1 import health_pb2

from sluice.command.topology import Probe
from sluice.mesh_config import Address, parse_address

TIMEOUT_S: Final = 2.0
_OPTIONS: Final = (("grpc.enable_http_proxy", 0),)


class Health(Enum):
    """What a process answers."""

    DOWN = "down"
    NOT_SERVING = "not serving"
    SERVING = "serving"


def check(probe: Probe, timeout_s: float = TIMEOUT_S) -> Health:
    """The answer within `timeout_s`."""
    if probe.http_path:
        return check_http(f"http://{probe.address}{probe.http_path}", timeout_s)
    if probe.ping:
        return check_ping(probe.address, timeout_s)
    return check_grpc(str(probe.address), timeout_s)


def check_grpc(target: str, timeout_s: float = TIMEOUT_S) -> Health:
    """grpc.health.v1 for the whole server."""
    with grpc.insecure_channel(target, options=_OPTIONS) as channel:
        ask = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            answer = ask(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError:
            return Health.DOWN
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return Health.SERVING
    return Health.NOT_SERVING


def check_ping(address: Address, timeout_s: float = TIMEOUT_S) -> Health:
    """A PING; a server that still loads its data answers otherwise, which is NOT_SERVING."""
    try:
        with socket.create_connection((address.host, address.port), timeout_s) as connection:
            connection.sendall(b"PING\r\n")
            answer = connection.recv(64)
    except OSError:
        return Health.DOWN
    return Health.SERVING if answer.startswith(b"+PONG") else Health.NOT_SERVING


def check_http(url: str, timeout_s: float = TIMEOUT_S) -> Health:
    """A GET that answers 200; another status is NOT_SERVING."""
    # Without proxies: the address is this machine's.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            return Health.SERVING if answer.status == 200 else Health.NOT_SERVING
    except urllib.error.HTTPError:
        return Health.NOT_SERVING
    except (OSError, ValueError):
        return Health.DOWN


def main(argv: list[str]) -> int:
    """Exit status 0 when it serves, 1 when it does not, 2 for wrong arguments."""
    match argv or os.environ.get("SLUICE_PROBE", "").split():
        case ["grpc", target]:
            health = check_grpc(target)
        case ["http", url]:
            health = check_http(url)
        case ["ping", target]:
            health = check_ping(parse_address(target, "the address"))
        case _:
            sys.stderr.write(
                "usage: python -m sluice.command.probe grpc HOST:PORT | http URL | ping HOST:PORT\n"
            )
            return 2
    return 0 if health is Health.SERVING else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
