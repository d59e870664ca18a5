"""A process that makes the chunks of one document and ends: ``python -m
agent_svc.adapters.parse_child MEDIA_TYPE CPU_S MEMORY_BYTES``.

Content on standard input, JSON on standard output: a list of [text, begin, end], or the name of
what is wrong with the content. Its depth is looked at before it is parsed. The process limits its
own processor time and memory, so that hostile content costs its own run only; when a limit ends it,
there is no output.
"""

from __future__ import annotations

import json
import resource
import sys

from agent_svc.adapters.blocks import NotTextError, blocks_of
from agent_svc.domain.chunking import TooManyChunksError, chunk
from agent_svc.domain.nesting import too_deep


def main(media_type: str, cpu_s: str, memory_bytes: str) -> None:
    """Reads, parses, writes."""
    # The soft limit's signal tells who waits that it was this.
    resource.setrlimit(resource.RLIMIT_CPU, (int(cpu_s), int(cpu_s) + 1))
    resource.setrlimit(resource.RLIMIT_AS, (int(memory_bytes), int(memory_bytes)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    content = sys.stdin.buffer.read()
    sys.stdout.write(json.dumps(_told(content, media_type)))


def _told(content: bytes, media_type: str) -> object:
    if too_deep(content.decode(errors="replace"), media_type):
        return "too_deep"
    try:
        chunks = chunk(blocks_of(content, media_type))
    except NotTextError:
        return "no_text"
    except TooManyChunksError:
        return "too_many_chunks"
    return [(one.text, one.begin_byte, one.end_byte) for one in chunks]


if __name__ == "__main__":
    main(*sys.argv[1:4])
