"""The process in which structured-output constraints are compiled before the engine sees them.

Run by path with nothing but xgrammar: it reads JSON lines on stdin (first the tokenizer, then one
constraint each) and answers each with a line on stdout: ``ready``, ``ok`` or ``refused``. It exists
because compiling runs in native code that can neither be interrupted nor bounded in memory inside
the service: a schema of a hundred bytes can ask for minutes or gigabytes. Here the memory is
limited by the kernel, and the caller kills the process when time is up.

Failure modes: it ends when stdin ends, that is with its parent; out of memory or out of stack it
dies, which the caller reads as a refusal.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import sys
import threading
from collections.abc import Callable
from functools import partial

COMPILER_CACHE_BYTES = 32 << 20


def main(memory_bytes: int) -> None:
    """Serves until stdin ends."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    tokenizer = json.loads(lines.get())["tokenizer"]
    import xgrammar

    compiler = xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo.deserialize_json(tokenizer),
        max_threads=1,
        cache_limit_bytes=COMPILER_CACHE_BYTES,
    )
    compile_of: dict[str, Callable[[str], object]] = {
        # As the engine compiles them: compact.
        "json_schema": partial(
            compiler.compile_json_schema, any_whitespace=False, separators=(",", ":")
        ),
        "regex": compiler.compile_regex,
        "ebnf": compiler.compile_grammar,
        "lark": compiler.compile_lark,
    }
    _limit_memory(memory_bytes)
    _answer("ready")
    while True:
        wanted = json.loads(lines.get())
        try:
            compile_of[wanted["kind"]](wanted["text"])
        except Exception:  # the compiler's words stay here; the caller has fixed ones
            _answer("refused")
        else:
            _answer("ok")


def _read(lines: queue.SimpleQueue[str]) -> None:
    """Ends the process with its parent, also in the middle of a compilation."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def _limit_memory(memory_bytes: int) -> None:
    """Address space is what the kernel limits: what is mapped now plus the allowance."""
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115, PTH123  # read once
    most = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(word: str) -> None:
    sys.stdout.write(word + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
