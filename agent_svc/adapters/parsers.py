"""Makes the chunks of a document in a process of its own.

Parsers of Markdown and HTML take quadratic time, or memory without bounds, on content that was
written for that (deep nesting, formatting that is opened a thousand times): within this process
they would hold the interpreter for minutes, and nothing could end them. The child limits its own
processor time and memory, gets an empty environment, and is killed when its time is over or the
caller goes away. It costs about 0.1 s of start. At most :data:`CHILDREN_MAX` run at once, at most
:data:`TENANT_CHILDREN_MAX` for one tenant: what a tenant puts makes its own documents wait, not
those of others.
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
from agent_svc.domain.nesting import ELEMENTS_MAX, MARKS_MAX
from sluice.errors import SluiceError, invalid
from sluice.fair_rooms import FairRooms

CONTENT_BYTES_MAX: Final = 3 << 20
CPU_S: Final = 2  # for a small document, most of it to begin with
CPU_S_PER_MIB: Final = 2  # 3 MiB of ordinary HTML or Markdown take 1.2 s, and may take 8
WALL_SHARE: Final = 6.0  # of the time on a busy machine to that on a processor
WALL_MORE_S: Final = 10.0
MEMORY_BYTES: Final = 1 << 30  # 3 MiB of ordinary HTML take 75 MB
CHILDREN_MAX: Final = 2
TENANT_CHILDREN_MAX: Final = 1
ATTEMPTS_MAX: Final = 2  # a child may be killed by others; one that content kills dies again

_rooms: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, FairRooms]] = WeakKeyDictionary()


async def document_chunks(tenant: str, content: bytes, media_type: str) -> Sequence[Chunk]:
    """The chunks of a tenant's document, the same for the same content. INVALID_ARGUMENT names the
    field: ``media_type`` when it is none of :data:`MEDIA_TYPES`; ``content`` when it is too large,
    no UTF-8, nested too deeply (``domain/nesting.py``), of too many chunks, or cannot be parsed
    within the limits."""
    if media_type not in MEDIA_TYPES:
        raise invalid("media_type", f"must be one of {', '.join(MEDIA_TYPES)}")
    if len(content) > CONTENT_BYTES_MAX:
        raise invalid("content", f"at most {CONTENT_BYTES_MAX} bytes")
    async with _all_rooms().room(tenant):
        for _ in range(ATTEMPTS_MAX):
            output, is_final = await _child(content, media_type)
            if output or is_final:
                break
    told = await asyncio.to_thread(_read, output)
    if told is None:
        raise invalid("content", "is too complex to be parsed")
    if isinstance(told, str):
        raise _refused(told)
    return [Chunk(number, *one) for number, one in enumerate(told)]


def cpu_limit_s(size: int) -> int:
    """Processor time for a document of so many bytes."""
    return CPU_S + -(-size * CPU_S_PER_MIB // (1 << 20))


def _all_rooms() -> FairRooms:
    """For the children of this process: it has one event loop; tests have several."""
    rooms = FairRooms(CHILDREN_MAX, TENANT_CHILDREN_MAX)
    return _rooms.setdefault(asyncio.get_running_loop(), rooms)


def _refused(told: str) -> SluiceError:
    if told == "no_text":
        return invalid("content", "must be UTF-8")
    if told == "too_deep":
        most = f"{ELEMENTS_MAX} elements of HTML, {MARKS_MAX} of formatting that are not closed"
        return invalid("content", f"is nested too deeply: at most {most}")
    return invalid("content", "makes more chunks than a document may have")


async def _child(content: bytes, media_type: str) -> tuple[bytes, bool]:
    """The output of a child, empty when it ended otherwise; and whether that is its last word: a
    limit ended it, and it was nobody else."""
    cpu_s = cpu_limit_s(len(content))
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "agent_svc.adapters.parse_child", media_type, str(cpu_s), str(MEMORY_BYTES)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        async with asyncio.timeout(WALL_MORE_S + WALL_SHARE * cpu_s):
            output, _ = await child.communicate(content)
        assert child.returncode is not None
        # It says itself that memory is short; a signal but that of its limit may be another's.
        is_final = child.returncode > 0 or child.returncode == -signal.SIGXCPU
        return output if child.returncode == 0 else b"", is_final
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
