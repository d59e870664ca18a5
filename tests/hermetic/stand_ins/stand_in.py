"""A process in the place of a service: serves grpc.health.v1 and behaves as it is told.

`behaviour.json` beside this file maps a process's name to rules:
  exit_code        ends at once with this code
  serving_after_s  NOT_SERVING until then
  ignore_term      does not end on SIGTERM
  stray            starts a child as engines do: no mark in its environment, deaf to SIGTERM
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

STRAY = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def main(kind: str, bind_variable: str) -> None:
    """Serves until SIGTERM."""
    name = os.environ.get("SLUICE_INFERENCE_INSTANCE", kind)
    path = Path(__file__).with_name("behaviour.json")
    rules = json.loads(path.read_text()).get(name, {}) if path.exists() else {}
    print(json.dumps({"level": "info", "service": name, "message": "stand-in started"}), flush=True)
    if "exit_code" in rules:
        print(f"{name} ends as it was told", file=sys.stderr, flush=True)
        raise SystemExit(rules["exit_code"])
    stop = threading.Event()
    deaf = rules.get("ignore_term", False)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: stop.set())
    if rules.get("stray"):
        subprocess.Popen([sys.executable, "-c", STRAY], env={"PATH": os.environ["PATH"]})
    server = grpc.server(ThreadPoolExecutor(4))
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    serving = health_pb2.HealthCheckResponse.SERVING
    delay_s = rules.get("serving_after_s", 0.0)
    servicer.set("", serving if not delay_s else health_pb2.HealthCheckResponse.NOT_SERVING)
    server.add_insecure_port(os.environ[bind_variable])
    server.start()
    if delay_s and not stop.wait(delay_s):
        servicer.set("", serving)
    stop.wait()
    server.stop(0.5).wait()
