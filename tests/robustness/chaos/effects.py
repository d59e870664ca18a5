"""A service with effects, as tools call it: counts what was asked and what it did.

`/charge` takes an idempotency key: the same key twice has one effect. `/mail` takes none: every
request is an effect. Effects happen when a request arrives; the answer comes later, so that a
caller may die between the two. A thread per request; one lock.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY_HEADER = "idempotency-key"
ANSWER_DELAY_S = {"/charge": (0.02, 0.2), "/mail": (0.2, 0.5)}
"""From the effect to its answer, least and most. Mails take long, so that kills meet them."""


class Effects:
    """What was asked and done, by order."""

    def __init__(self, seed: int) -> None:
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self.charges: dict[str, str] = {}
        """Key of a charge -> its order."""
        self.charge_requests: Counter[str] = Counter()
        self.mails: Counter[str] = Counter()
        self.without_key = 0
        self.requests = 0
        """All of them; a single number, read without the lock."""
        self.port = 0

    def charged(self, order: str) -> int:
        """How often an order was charged: once per key."""
        with self._lock:
            return sum(one == order for one in self.charges.values())

    def mailed(self, order: str) -> int:
        """How often a mail was sent about an order."""
        with self._lock:
            return self.mails[order]

    def take(self, path: str, key: str, order: str) -> dict[str, Any]:
        """One request; its answer."""
        with self._lock:
            self.requests += 1
            delay_s = self._random.uniform(*ANSWER_DELAY_S[path])
            if path == "/charge":
                self.without_key += not key
                self.charge_requests[order] += 1
                self.charges.setdefault(key, order)
            else:
                self.mails[order] += 1
        time.sleep(delay_s)
        return {"done": order}


@contextmanager
def effects_server(seed: int) -> Iterator[Effects]:
    """The service on a free port."""
    effects = Effects(seed)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            size = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(size) or b"{}")
            done = effects.take(self.path, self.headers.get(KEY_HEADER, ""), body["order"])
            answer = json.dumps(done).encode()
            try:
                self.send_response(200)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except OSError:
                self.close_connection = True  # the caller is gone

        def log_message(self, *_: object) -> None:
            """Nothing."""

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A caller that was killed resets its connection."""

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    effects.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, name="effects", daemon=True)
    thread.start()
    try:
        yield effects
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
