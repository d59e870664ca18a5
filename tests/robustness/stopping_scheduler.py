"""A scheduler that stops itself (SIGSTOP) between signing a start and writing it.

``STOP_FILE``: while that file exists, the next frame with a start is composed, the file is removed
and the process stops before the frame is written. Its registration for quotas lives 1.5 s, less
than the 3 s of silence after which its frame streams are given up: so the frame still arrives.
"""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path

from scheduler_svc import main
from scheduler_svc.adapters.execution_link import ExecutionLink
from scheduler_svc.adapters.quota_client import QuotaClient
from scheduler_svc.domain.quota import QuotaTimes
from sluice.execution.v1 import execution_pb2
from sluice.server import run

_compose = ExecutionLink._compose
_stop = Path(os.environ["STOP_FILE"])


def compose(self: ExecutionLink, heartbeat: bool) -> execution_pb2.ExecuteFramesRequest | None:
    """As the original; stops when asked to."""
    request = _compose(self, heartbeat)
    if request is not None and any(p.frame.starts for p in request.parts) and _stop.exists():
        _stop.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
    return request


ExecutionLink._compose = compose  # type: ignore[method-assign]
TIMES = QuotaTimes(holder_ttl_s=1.5, heartbeat_s=0.5)
main.QuotaClient = partial(QuotaClient, times=TIMES)  # type: ignore[assignment,attr-defined]

if __name__ == "__main__":
    sys.exit(run(main.serve()))
