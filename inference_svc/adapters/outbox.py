"""What gathers for the peer of a frame stream until the connection can take the next frame.

Owns the frames in the making. Concurrency: called from the event loop only, never waits. Bounds: a
frame's deltas and its events are cut at :data:`FRAME_BYTES_MAX` each; a peer that does not read
lets deltas gather, up to :attr:`Outbox.overfull`, at which the stream ends itself.

Adding a delta is the hot path: one call into the batch that gathers and one test of a flag.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from sluice.inference.v1 import inference_pb2

FRAME_BYTES_MAX = 256 * 1024
# About 100 bytes each: 50 MB, or several full contexts of the largest batches.
DELTAS_PENDING_MAX = 500_000

_ENTRY_TAG = 0x0A  # DeltaBatch.deltas, length-delimited


class Outbox:
    """Frames in the making. ``wake`` is called once when the first thing gathers after a
    :meth:`take` that found nothing more."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._cut: deque[inference_pb2.GenerateFramesResponse] = deque()
        self._sealed: deque[tuple[inference_pb2.GenerateFramesResponse, inference_pb2.DeltaBatch]]
        self._sealed = deque()
        self._sealed_deltas = 0
        self.awake = False
        self.number = 0  # of the frame that gathers, counting up
        self._open()

    def _open(self) -> None:
        self.number += 1
        self._frame = inference_pb2.GenerateFramesResponse()
        self._batch = inference_pb2.DeltaBatch()
        self._event_bytes = 0
        # The bound method saves two look-ups per token.
        self.add_delta = self._batch.deltas.add

    def rouse(self) -> None:
        """Says that something gathered. Callers test :attr:`awake` first."""
        if not self.awake:
            self.awake = True
            self._wake()

    def put(self, event: inference_pb2.Event) -> int:
        """Adds an event; returns the number of the frame that it is in."""
        size = event.ByteSize()
        if self._event_bytes + size > FRAME_BYTES_MAX:
            self.seal(self.number)
        self._event_bytes += size
        self._frame.events.append(event)
        self.rouse()
        return self.number

    def seal(self, number: int) -> None:
        """Closes frame ``number`` if it still gathers: what follows goes into a later one."""
        if number == self.number:
            self._sealed.append((self._frame, self._batch))
            self._sealed_deltas += len(self._batch.deltas)
            self._open()

    @property
    def overfull(self) -> bool:
        """Whether more has gathered than a peer that reads could leave."""
        return self._sealed_deltas + len(self._batch.deltas) > DELTAS_PENDING_MAX

    def take(self) -> inference_pb2.GenerateFramesResponse | None:
        """The next frame, without sequence and epoch; ``None`` when nothing has gathered."""
        if self._cut:
            return self._cut.popleft()
        if self._sealed:
            frame, batch = self._sealed.popleft()
            self._sealed_deltas -= len(batch.deltas)
        elif self._batch.deltas or self._event_bytes:
            frame, batch = self._frame, self._batch
            self._open()
        else:
            self.awake = False
            return None
        deltas = batch.SerializeToString()
        if len(deltas) > FRAME_BYTES_MAX:
            *first, deltas = cut_batch(deltas, FRAME_BYTES_MAX)
            self._cut.extend(inference_pb2.GenerateFramesResponse(deltas=part) for part in first)
            frame.deltas = deltas
            self._cut.append(frame)
            return self._cut.popleft()
        if deltas:
            frame.deltas = deltas
        return frame


def cut_batch(deltas: bytes, limit: int) -> Iterator[bytes]:
    """Cuts a serialized DeltaBatch between its entries into parts of at most ``limit`` bytes; an
    entry that is larger is a part of its own."""
    start = end = 0
    while end < len(deltas):
        following = _entry_end(deltas, end)
        if following - start > limit and end > start:
            yield deltas[start:end]
            start = end
        end = following
    yield deltas[start:]


def _entry_end(data: bytes, at: int) -> int:
    assert data[at] == _ENTRY_TAG
    at += 1
    length = shift = 0
    while True:
        byte = data[at]
        at += 1
        length |= (byte & 0x7F) << shift
        if byte < 0x80:
            return at + length
        shift += 7
