"""One servicer of the methods that several define."""

from __future__ import annotations

from typing import Final

from sluice.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc

_METHODS: Final = tuple(
    scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].methods_by_name
)


def joined(
    *apis: scheduler_pb2_grpc.SchedulerServiceServicer,
) -> scheduler_pb2_grpc.SchedulerServiceServicer:
    """A servicer with the methods that ``apis`` define themselves. What none defines is the
    generated base's, which answers UNIMPLEMENTED."""
    whole = scheduler_pb2_grpc.SchedulerServiceServicer()  # type: ignore[abstract]
    for api in apis:
        for name in _METHODS:
            if name in vars(type(api)):
                setattr(whole, name, getattr(api, name))
    return whole
