"""Keeps one engine running: loads it, watches it, replaces it when it fails.

Owns the engine and its incarnation number, the epoch. Concurrency: one task,
:meth:`EngineHost.run`, loads and watches; everything else reads the state from the same event loop
and is told of changes by callbacks.

Failures: an engine that cannot start or that stops being healthy is closed and made anew after a
pause; after :data:`FAILURES_MAX` failures without :data:`SOUND_S` of service between them `run`
raises, and the process ends so that its supervisor starts a clean one. A new incarnation has a new
epoch; frame streams of an older one are ended, since what ran on them is gone. A ValueError at the
first start, which a validation of settings is too, is not tried again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

from inference_svc.domain.credit import Room
from inference_svc.ports import Engine, ModelDescription
from sluice import logs
from sluice.errors import failed_precondition, unavailable
from sluice.ids import new_epoch

log = logs.get(__name__)

WATCH_S = 0.1  # between two looks at the engine's health
FAILURES_MAX = 3
SOUND_S = 60.0
PAUSE_S = 1.0  # before the first replacement; doubles
CLOSE_S = 35.0  # an engine closes within 30 s
NOT_READY_RETRY_S = 1.0
REFUSAL_CHARS_MAX = 500


class EngineFailedError(Exception):
    """The engine cannot be kept running in this process."""


class EngineRefusedError(Exception):
    """The engine cannot start with its settings; the text says in one line what is wrong with
    them."""


class EngineHost:
    """The engine of this process. ``model_names`` are further names of the model it serves."""

    def __init__(self, make: Callable[[], Engine], model_names: Sequence[str] = ()) -> None:
        self._make = make
        self._further_names = frozenset(model_names)
        self._engine: Engine | None = None
        self._up = False  # it was started
        self._watchers: dict[int, Callable[[], None]] = {}
        self._watcher_ids = 0
        self.description: ModelDescription | None = None
        self.epoch = 0
        self.served_names: frozenset[str] = frozenset()
        self.draining = False

    @property
    def serving(self) -> bool:
        """Whether the engine can take work now."""
        return self._up and self._engine is not None and self._engine.healthy

    @property
    def simulated(self) -> bool:
        """Whether answers are made by the simulated engine, as far as is known yet."""
        return self.description is not None and self.description.simulated

    @property
    def capacity(self) -> Room:
        """The room of the running engine; none without one, or when it only embeds."""
        if not self.serving or self.description is None or not self.description.generate:
            return Room(0, 0)
        return Room(self.description.sequences_max, self.description.kv_tokens)

    def engine(self) -> Engine:
        """The running engine. UNAVAILABLE while there is none."""
        if self._engine is None or not self.serving:
            raise unavailable(
                "ENGINE_NOT_SERVING",
                "The engine of this instance is not serving now.",
                retry_after_s=NOT_READY_RETRY_S,
            )
        return self._engine

    def generator(self) -> Engine:
        """:meth:`engine`, if its model generates; otherwise FAILED_PRECONDITION."""
        engine = self.engine()
        if not self.model().generate:
            raise failed_precondition("CANNOT_GENERATE", "This model does not generate text.")
        return engine

    def model(self) -> ModelDescription:
        """What it serves. UNAVAILABLE before the first engine is loaded."""
        if self.description is None:
            raise unavailable(
                "ENGINE_NOT_SERVING",
                "The engine of this instance is still loading.",
                retry_after_s=NOT_READY_RETRY_S,
            )
        return self.description

    def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls back after each change of epoch, serving or draining; returns what ends that."""
        self._watcher_ids += 1
        number = self._watcher_ids
        self._watchers[number] = callback

        def unwatch() -> None:
            self._watchers.pop(number, None)

        return unwatch

    def drain(self) -> None:
        """Nothing new starts from now on. Idempotent."""
        if not self.draining:
            self.draining = True
            self._tell()

    async def run(self) -> None:
        """Keeps the engine running until cancelled. Raises EngineFailedError to give up, and
        EngineRefusedError when another attempt would end the same way."""
        loop = asyncio.get_running_loop()
        failures = 0
        while True:
            if await self._load():
                up_at = loop.time()
                await self._until_unhealthy()
                if loop.time() - up_at >= SOUND_S:
                    failures = 0
            await self.close()
            failures += 1
            if failures >= FAILURES_MAX:
                raise EngineFailedError(f"the engine failed {failures} times in a row")
            await asyncio.sleep(PAUSE_S * 2.0 ** (failures - 1))

    async def _load(self) -> bool:
        """Makes and starts an engine; whether it is up."""
        loop = asyncio.get_running_loop()
        began_at = loop.time()
        try:
            self._engine = self._make()
            await self._engine.start()
            description = self._engine.describe()
        except Exception as error:
            log.failure("the engine did not start", error)
            # An engine that has served once has settings that it can start with.
            if isinstance(error, ValueError) and self.epoch == 0:
                await self.close()
                raise EngineRefusedError(refusal(error)) from error
            return False
        self._up = True
        self.description = description
        self.served_names = self._further_names | {description.model}
        self.epoch = new_epoch()
        log.info(
            "the engine serves; SIMULATED: its answers are not a model's"
            if description.simulated
            else "the engine serves",
            engine=description.engine,
            model=description.model,
            load_s=round(loop.time() - began_at, 1),
        )
        self._tell()
        return True

    async def _until_unhealthy(self) -> None:
        # The port has no event for it: an engine may die in another process.
        while self.serving:  # noqa: ASYNC110
            await asyncio.sleep(WATCH_S)
        log.error("the engine is not healthy any more")
        self._tell()

    async def close(self) -> None:
        """Closes the engine. Idempotent; bounded by :data:`CLOSE_S`."""
        engine, self._engine = self._engine, None
        was_up, self._up = self._up, False
        if was_up:
            self._tell()
        if engine is None:
            return
        try:
            async with asyncio.timeout(CLOSE_S):
                await engine.close()
        except TimeoutError:
            log.error("the engine did not close in time", limit_s=CLOSE_S)
        except Exception as error:
            log.failure("the engine did not close in order", error)

    def _tell(self) -> None:
        for callback in list(self._watchers.values()):
            callback()


def refusal(error: ValueError) -> str:
    """What a validation found, in one line of at most :data:`REFUSAL_CHARS_MAX` characters.

    Several lines are a headline, then field and finding of each fault; a finding ends with the
    rejected values, which can be thousands of characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    for above, line in itertools.pairwise(lines):
        finding, mark, _ = line.partition(" [type=")
        if mark:
            field = "" if above == lines[0] else f"{above}: "
            return f"{field}{finding.removeprefix('Value error, ')}"[:REFUSAL_CHARS_MAX]
    return lines[0][:REFUSAL_CHARS_MAX]
