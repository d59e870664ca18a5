"""A process that makes the chunks of one document and ends: ``python -m
agent_svc.adapters.parse_child MEDIA_TYPE CPU_S MEMORY_BYTES``.

Content on standard input, JSON on standard output: a list of [text, begin, end], or the name of
what is wrong with the content. It limits its own processor time and memory, so that hostile content
costs its own run only; when a limit ends it, there is no output.
"""

from __future__ import annotations

import json
import resource
import sys

from agent_svc.adapters.blocks import NotTextError, blocks_of
from agent_svc.domain.chunking import TooManyChunksError, chunk


def main(media_type: str, cpu_s: str, memory_bytes: str) -> None:
    """Reads, parses, writes."""
    # The soft limit's signal tells who waits that it was this.
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    content = sys.stdin.buffer.read()
    try:
        chunks = chunk(blocks_of(content, media_type))
    except NotTextError:
        told: object = "no_text"
    except TooManyChunksError:
        told = "too_many_chunks"
    else:
        told = [(one.text, one.begin_byte, one.end_byte) for one in chunks]
    sys.stdout.write(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:4])
