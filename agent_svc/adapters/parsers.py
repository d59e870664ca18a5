"""Makes the chunks of a document in a process of its own.

Parsers of Markdown and HTML take quadratic time, or memory without bounds, on content that was
written for that (deep nesting, formatting that is opened a thousand times): within this process
they would hold the interpreter for minutes, and nothing could end them. The child limits its own
processor time and memory, gets an empty environment, and is killed when its time is over or the
caller goes away. It costs about 0.1 s of start. At most :data:`CHILDREN_MAX` run at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final
from weakref import WeakKeyDictionary

from agent_svc.adapters.blocks import MEDIA_TYPES
from agent_svc.domain.chunking import Chunk
from sluice.errors import SluiceError, invalid

CONTENT_BYTES_MAX: Final = 3 << 20
CPU_S: Final = 20  # 3 MiB of ordinary HTML or Markdown take 1.2 s
WALL_S: Final = 60.0  # on a busy machine
MEMORY_BYTES: Final = 1 << 30  # 3 MiB of ordinary HTML take 75 MB
CHILDREN_MAX: Final = 2
ATTEMPTS_MAX: Final = 2  # a child may be killed by others; one that content kills dies again

_rooms: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore]] = WeakKeyDictionary()


async def document_chunks(content: bytes, media_type: str) -> Sequence[Chunk]:
    """The chunks of a document, the same for the same content. INVALID_ARGUMENT names the field:
    ``media_type`` when it is none of :data:`MEDIA_TYPES`; ``content`` when it is too large, no
    UTF-8, of too many chunks, or cannot be parsed within the limits."""
    if media_type not in MEDIA_TYPES:
        raise invalid("media_type", f"must be one of {', '.join(MEDIA_TYPES)}")
    if len(content) > CONTENT_BYTES_MAX:
        raise invalid("content", f"at most {CONTENT_BYTES_MAX} bytes")
    async with _room():
        for _ in range(ATTEMPTS_MAX):
            output, was_limit = await _child(content, media_type)
            if output or was_limit:
                break
    told = await asyncio.to_thread(_read, output)
    if told is None:
        raise invalid("content", "is too complex to be parsed")
    if isinstance(told, str):
        raise _refused(told)
    return [Chunk(number, *one) for number, one in enumerate(told)]


def _room() -> asyncio.Semaphore:
    """For the children of this process: it has one event loop; tests have several."""
    return _rooms.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(CHILDREN_MAX))


def _refused(told: str) -> SluiceError:
    if told == "no_text":
        return invalid("content", "must be UTF-8")
    return invalid("content", "makes more chunks than a document may have")


async def _child(content: bytes, media_type: str) -> tuple[bytes, bool]:
    """The output of a child, empty when it ended otherwise; and whether a time limit ended it."""
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "agent_svc.adapters.parse_child", media_type, str(CPU_S), str(MEMORY_BYTES)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        async with asyncio.timeout(WALL_S):
            output, _ = await child.communicate(content)
        return output if child.returncode == 0 else b"", child.returncode == -signal.SIGXCPU
    except TimeoutError:
        return b"", True
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


def _read(output: bytes) -> list[tuple[str, int, int]] | str | None:
    if not output:
        return None
    told: list[tuple[str, int, int]] | str = json.loads(output)
    return told
