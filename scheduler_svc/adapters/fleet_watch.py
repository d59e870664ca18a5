"""Finds the instances and watches their load.

Targets come from the configuration: ``name=host:port`` (static) or ``dns:///host:port``, which is
resolved again every ``RESOLVE_INTERVAL_S``. Each address has one watcher task with its own
connection, apart from the frame streams: ``GetModel`` once per engine incarnation, then the
``WatchLoad`` stream. An instance is known by the name it reports, since that name is the audience
of its grants.

Failure modes: no report for ``SILENCE_LIMIT_S`` or a broken stream -> the instance is unreachable
and the watcher reconnects with backoff for ever; a failing DNS look-up keeps the last addresses,
and an address that is no longer found stays until those that are have answered. Nothing depends on
one event: every report says all, and every look-up gives the whole list.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import grpc
from google.protobuf import duration_pb2

from scheduler_svc.domain.model import GpuState, InstanceName, InstanceReport
from sluice import logs
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc, load_pb2

REPORT_INTERVAL_S: Final = 0.25
SILENCE_LIMIT_S: Final = 2.0
CALL_TIMEOUT_S: Final = 2.0
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 1.0
RESOLVE_INTERVAL_S: Final = 5.0
RETIRE_MAX_S: Final = 30.0
"""So long an address that is no longer found is kept while new ones have not answered."""

# A power cap set in software is not among them: under full load it is how a GPU runs, and the
# learnt rates show it.
_SLOWED: Final = frozenset(
    (
        load_pb2.THROTTLE_REASON_HW_SLOWDOWN,
        load_pb2.THROTTLE_REASON_HW_THERMAL,
        load_pb2.THROTTLE_REASON_HW_POWER_BRAKE,
        load_pb2.THROTTLE_REASON_SW_THERMAL,
    )
)

log = logs.get(__name__)


class FleetObserver(Protocol):
    """What the gate hears about instances; synchronous."""

    def report(self, report: InstanceReport, address: str) -> None:
        """A fresh load report."""

    def unreachable(self, name: InstanceName, reason: str) -> None:
        """An instance stopped answering."""

    def remove(self, name: InstanceName) -> None:
        """An instance is not part of the fleet any more."""


class FleetWatch:
    """See the module's docstring."""

    def __init__(
        self,
        targets: Iterable[str],
        open_channel: Callable[[str], grpc.aio.Channel],
        observer: FleetObserver,
    ) -> None:
        self.models: dict[InstanceName, inference_pb2.GetModelResponse] = {}
        self.reports: dict[InstanceName, inference_pb2.WatchLoadResponse] = {}
        self.reported_at_s: dict[InstanceName, float] = {}
        self._silent: set[InstanceName] = set()
        self._looked: set[str] = set()
        self._static = [target.split("=", 1)[-1] for target in targets if "dns:///" not in target]
        self._dns = [target.removeprefix("dns:///") for target in targets if "dns:///" in target]
        self._open_channel = open_channel
        self._observer = observer
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._names: dict[str, InstanceName] = {}
        self._gone_since_s: float | None = None

    @property
    def looked_at_all(self) -> bool:
        """Whether every address has answered, or failed to, at least once."""
        resolved = bool(self._watchers) or not (self._static or self._dns)
        return resolved and self._watchers.keys() <= self._looked

    @property
    def knows_all(self) -> bool:
        """Whether every address has said which model it has: what is not known is not there."""
        return self.looked_at_all and self._watchers.keys() <= self._names.keys()

    async def run(self) -> None:
        """Watches the fleet until cancelled."""
        async with asyncio.TaskGroup() as group:
            for address in self._static:
                self._watchers[address] = group.create_task(self._watch(address))
            while self._dns:
                await self._resolve(group)
                await asyncio.sleep(RESOLVE_INTERVAL_S)

    async def _resolve(self, group: asyncio.TaskGroup) -> None:
        loop = asyncio.get_running_loop()
        found: set[str] = set(self._static)
        for target in self._dns:
            host, _, port = target.rpartition(":")
            try:
                answers = await loop.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
            except OSError:
                log.warning("DNS look-up failed; the last addresses stay", host=host)
                return
            for family, _, _, _, sockaddr in answers:
                literal = f"[{sockaddr[0]!s}]" if family == socket.AF_INET6 else str(sockaddr[0])
                found.add(f"{literal}:{port}")
        for address in found - self._watchers.keys():
            self._watchers[address] = group.create_task(self._watch(address))
        gone = self._watchers.keys() - found
        if self._may_retire(gone, found):
            for address in gone:
                self._watchers.pop(address).cancel()
                self._looked.discard(address)
                self._forget(address)

    def _may_retire(self, gone: set[str], found: set[str]) -> bool:
        """Whether addresses that are no longer found may go: when those that are have said what
        they serve, for in a rolling update the names of the old ones go before the new ones are
        ready, and a model must not be unknown in between."""
        now = asyncio.get_running_loop().time()
        if not gone:
            self._gone_since_s = None
            return False
        if self._gone_since_s is None:
            self._gone_since_s = now
        if found <= self._names.keys() or now - self._gone_since_s >= RETIRE_MAX_S:
            self._gone_since_s = None
            return True
        return False

    def _forget(self, address: str) -> None:
        name = self._names.pop(address, None)
        if name is not None:
            self._silent.discard(name)
            for known in (self.models, self.reports, self.reported_at_s):
                known.pop(name, None)
            self._observer.remove(name)

    async def _watch(self, address: str) -> None:
        retry_s = RETRY_MIN_S
        async with self._open_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            while True:
                began = asyncio.get_running_loop().time()
                try:
                    await self._follow(stub, address)
                    reason = "the load stream ended"
                except grpc.aio.AioRpcError as error:
                    reason = error.code().name
                except TimeoutError:
                    reason = f"no load report for {SILENCE_LIMIT_S} s"
                self._looked.add(address)
                if (name := self._names.get(address)) is not None:
                    self._silent.add(name)
                    self._observer.unreachable(name, reason)
                if asyncio.get_running_loop().time() - began > RETRY_MAX_S:
                    retry_s = RETRY_MIN_S
                await asyncio.sleep(retry_s)
                retry_s = min(retry_s * 2, RETRY_MAX_S)

    async def _follow(
        self, stub: inference_pb2_grpc.InferenceServiceAsyncStub, address: str
    ) -> None:
        interval = duration_pb2.Duration(nanos=int(REPORT_INTERVAL_S * 1e9))
        call = stub.WatchLoad(inference_pb2.WatchLoadRequest(interval=interval))
        model: inference_pb2.GetModelResponse | None = None
        try:
            while True:
                async with asyncio.timeout(SILENCE_LIMIT_S):
                    load = await call.read()
                if not isinstance(load, inference_pb2.WatchLoadResponse):
                    return
                self._looked.add(address)
                if not load.serving and (model is None or model.epoch != load.epoch):
                    continue  # the engine starts: there is nothing to describe yet
                if model is None or model.epoch != load.epoch:
                    request = inference_pb2.GetModelRequest()
                    model = await stub.GetModel(request, timeout=CALL_TIMEOUT_S)
                    if not self._claim(address, InstanceName(model.instance)):
                        return
                name = InstanceName(model.instance)
                self.models[name] = model
                self.reports[name] = load
                self._silent.discard(name)
                self.reported_at_s[name] = asyncio.get_running_loop().time()
                self._observer.report(instance_report(model, load), address)
        finally:
            call.cancel()

    def _claim(self, address: str, name: InstanceName) -> bool:
        """Ties a name to an address. False when another address answers under that name."""
        holder = next((other for other, held in self._names.items() if held == name), address)
        if holder != address and self.is_fresh(name):
            log.error("two addresses have one name", name=name, first=holder, ignored=address)
            return False
        self._names.pop(holder, None)
        if self._names.get(address, name) != name:
            self._forget(address)
        self._names[address] = name
        return True

    def is_fresh(self, name: InstanceName) -> bool:
        """Whether an instance reported within the silence limit and its watch did not break."""
        age_s = asyncio.get_running_loop().time() - self.reported_at_s.get(name, float("-inf"))
        return age_s < SILENCE_LIMIT_S and name not in self._silent


def instance_report(
    model: inference_pb2.GetModelResponse, load: inference_pb2.WatchLoadResponse
) -> InstanceReport:
    """The domain's view of an instance."""
    engine = load.engine
    optional: dict[str, Any] = {
        name: getattr(engine, name) if engine.HasField(name) else None
        for name in (
            "running",
            "waiting",
            "kv_tokens_used",
            "prompt_tokens_per_s",
            "output_tokens_per_s",
            "step_ms",
        )
    }
    return InstanceReport(
        name=InstanceName(model.instance),
        model=model.model,
        fingerprint=model.fingerprint,
        serving=load.serving,
        draining=load.draining,
        sequences_max=model.sequences_max,
        kv_tokens=model.kv_tokens,
        context_tokens=model.context_tokens,
        step_tokens_max=model.step_tokens_max,
        kv_block_tokens=model.kv_block_tokens,
        generates=model.capabilities.generate,
        embeds=model.capabilities.embed,
        simulated=model.simulated,
        epoch=str(model.epoch),
        gpus=gpu_state(load.gpus),
        **optional,
    )


def gpu_state(gpus: Sequence[load_pb2.GpuReading]) -> GpuState | None:
    """All GPUs of an instance as one: an instance is as well as the worst of them."""
    if not gpus:
        return None
    free = [
        1.0 - gpu.memory_used_bytes / gpu.memory_total_bytes
        for gpu in gpus
        if gpu.HasField("memory_used_bytes") and gpu.memory_total_bytes
    ]
    xids = [gpu.xid_errors for gpu in gpus if gpu.HasField("xid_errors")]
    eccs = [gpu.ecc_uncorrected_errors for gpu in gpus if gpu.HasField("ecc_uncorrected_errors")]
    return GpuState(
        memory_free=min(free) if free else None,
        throttled=any(reason in _SLOWED for gpu in gpus for reason in gpu.throttle_reasons),
        xid_errors=sum(xids) if xids else None,
        ecc_errors=sum(eccs) if eccs else None,
    )
