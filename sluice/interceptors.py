"""What happens around every call of a server, before and after its handler.

One interceptor with three layers, in this order: context (request id and trace context from the
metadata), deadline (the caller's, or the method's default, capped), errors (SluiceError to a typed
status; anything else to INTERNAL with a fixed text). They are one object because each interceptor
of the library costs a coroutine and a handler object per call. Wrapped handlers are kept, one per
method, so a call costs a dictionary lookup and a few context variables.

An exception's text never reaches a client: the library itself would send it. It goes to the log
under the request id. CancelledError is never swallowed; when the handler's task was cancelled from
inside, the client is told, which the library does not do: it would wait for ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from sluice import context, deadline, logs
from sluice.deadline import Deadline, MethodDeadline
from sluice.errors import Code, SluiceError, deadline_exceeded, internal, invalid, unavailable
from sluice.frames import FrameBroken
from sluice.ids import is_request_id, new_request_id
from sluice.reasons import complete
from sluice.status import TEXT_CHARS_MAX, from_rpc_error, grpc_code, trailers

REQUEST_ID_KEY = "x-request-id"

# A handler answers at its deadline by itself, with what it knows. One that does not is ended this
# long after it.
DEADLINE_BACKSTOP_S = 0.5
# What a write raises whose client left a moment before the handler's task is told so. The library
# does not publish the class.
PEER_GONE = "ExecuteBatchError"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"  # not subscriptable at run time
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Behaviour: TypeAlias = "Callable[[Any, Context], Any]"
Wrapped: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"

log = logs.get(__name__)

_METHOD_NOT_AVAILABLE = SluiceError(
    Code.UNIMPLEMENTED, "METHOD_NOT_AVAILABLE", "This method is not available here."
)
_UNREADABLE = SluiceError(
    Code.INVALID_ARGUMENT, "MESSAGE_UNREADABLE", "The request message cannot be decoded."
)
# Codes of a failed inner call that say the same about the outer one.
_PASSED_ON = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.RESOURCE_EXHAUSTED})


class CallCounts:
    """Calls in progress and ended, by method and code, as plain numbers for metrics."""

    def __init__(self) -> None:
        self.open: dict[str, int] = {}
        self.ended: dict[tuple[str, str], int] = {}

    def end(self, method: str, code: str) -> None:
        """A call ended."""
        key = (method, code)
        self.ended[key] = self.ended.get(key, 0) + 1
        self.open[method] -= 1

    def open_readings(self) -> Iterable[tuple[int, Mapping[str, str]]]:
        """For the metric ``sluice.rpc.open``."""
        return [(n, {"method": method}) for method, n in list(self.open.items())]

    def ended_readings(self) -> Iterable[tuple[int, Mapping[str, str]]]:
        """For the metric ``sluice.rpc.calls``."""
        return [(n, {"method": m, "code": code}) for (m, code), n in list(self.ended.items())]


class CallInterceptor(grpc.aio.ServerInterceptor):
    """The three layers. ``deadlines`` is by full method name (``/package.Service/Method``); a
    method without one has only the deadline that its caller sets, as frame streams need.
    ``message_bytes`` is the exact limit of a request message: the library's own limit is higher,
    because its refusal has no details and looks like a busy server."""

    def __init__(self, deadlines: Mapping[str, MethodDeadline], message_bytes: int) -> None:
        self._deadlines = deadlines
        self._message_bytes = message_bytes
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        self._unavailable: Handler = grpc.stream_stream_rpc_method_handler(
            cast("Any", self._not_available), None, None
        )
        self.counts = CallCounts()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        _bind_context(handler_call_details.invocation_metadata)
        handler = await continuation(handler_call_details)
        if handler is None:
            return self._unavailable
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is not None and known[0] is handler:
            return known[1]
        wrapped = self._wrap(method, handler)
        self._wrapped[method] = (handler, wrapped)
        return wrapped

    async def _not_available(self, _: object, call: Context) -> None:
        await _abort(call, _METHOD_NOT_AVAILABLE)

    def _wrap(self, method: str, handler: Handler) -> Handler:
        behaviour = cast(
            "Behaviour",
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream,
        )
        self.counts.open[method] = 0
        if inspect.isasyncgenfunction(behaviour):
            inner = _written_out(behaviour)
        elif inspect.iscoroutinefunction(behaviour):
            inner = behaviour
        else:
            # Handlers are async; what is not is a generated method that nobody implemented.
            inner = self._not_available
        guarded = self._guard(method, inner, check_request=not handler.request_streaming)
        limits = self._checked_deserializer(handler)
        serializer = handler.response_serializer
        if handler.request_streaming and handler.response_streaming:
            make: Callable[..., Handler] = grpc.stream_stream_rpc_method_handler
        elif handler.request_streaming:
            make = grpc.stream_unary_rpc_method_handler
        elif handler.response_streaming:
            make = grpc.unary_stream_rpc_method_handler
        else:
            make = grpc.unary_unary_rpc_method_handler
        return make(guarded, limits, serializer)

    def _checked_deserializer(self, handler: Handler) -> Callable[[bytes], Any]:
        """Finds messages that are too long or unreadable. The library decodes a single request
        before the handler runs and would send the exception's text: there the error takes the
        message's place. A streamed one is decoded inside the handler, which may raise."""
        decode = handler.request_deserializer
        limit = self._message_bytes
        too_long = invalid(
            "message", f"A request message may have at most {limit} bytes.", "MESSAGE_TOO_LARGE"
        )

        def checked(data: bytes) -> Any:
            error: SluiceError | None = None
            if len(data) > limit:
                error = too_long
            else:
                try:
                    return data if decode is None else decode(data)
                except (DecodeError, ValueError):
                    error = _UNREADABLE
            if handler.request_streaming:
                raise error
            return error

        return checked

    def _guard(self, method: str, inner: Wrapped, *, check_request: bool) -> Wrapped:
        granted = self._deadlines.get(method)
        counts = self.counts

        async def call(request: Any, call_context: Context) -> Any:
            counts.open[method] += 1
            code = "INTERNAL"
            try:
                if check_request and isinstance(request, SluiceError):
                    raise request
                with _deadline(call_context, granted):
                    result = await inner(request, call_context)
                code = "OK"
                return result
            except asyncio.CancelledError:
                code = "CANCELLED"
                await _tell_cancelled(call_context)
                raise
            except grpc.aio.AbortError:
                code = "ABORTED_BY_HANDLER"
                raise
            except Exception as error:
                if any(type(leaf).__name__ == PEER_GONE for leaf in _leaves(error)):
                    code = "CANCELLED"
                    await _tell_cancelled(call_context)
                    raise asyncio.CancelledError from None
                typed = _typed(error, method)
                code = typed.code.name
                await _abort(call_context, typed)
            finally:
                counts.end(method, code)

        return call


def _written_out(behaviour: Behaviour) -> Wrapped:
    """A generator handler as a coroutine that writes, which saves a generator per layer."""

    async def call(request: Any, call_context: Context) -> None:
        messages = cast("AsyncIterator[Any]", behaviour(request, call_context))
        async with contextlib.aclosing(cast("Any", messages)):
            async for message in messages:
                await call_context.write(message)

    return call


def _bind_context(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    request_id = traceparent = tracestate = ""
    for key, value in metadata:
        if key == REQUEST_ID_KEY:
            request_id = str(value)
        elif key == "traceparent":
            traceparent = str(value)
        elif key == "tracestate":
            tracestate = str(value)
    context.request_id.set(request_id if is_request_id(request_id) else new_request_id())
    if traceparent and context.is_traceparent(traceparent):
        context.traceparent.set(traceparent)
        context.tracestate.set(tracestate[: context.TRACESTATE_CHARS_MAX])


@contextlib.contextmanager
def _deadline(call_context: Context, granted: MethodDeadline | None) -> Iterator[None]:
    asked = cast("float | None", call_context.time_remaining())
    seconds = asked if granted is None else granted.grant(asked)
    if seconds is None:
        yield
        return
    if seconds <= 0:
        raise deadline_exceeded(message="The deadline had passed on arrival; nothing was done.")
    loop = asyncio.get_running_loop()
    deadline.set_current(Deadline(loop.time() + seconds))
    task = cast("asyncio.Task[Any]", asyncio.current_task())
    backstop = _Backstop(task)
    timer = loop.call_later(seconds + DEADLINE_BACKSTOP_S, backstop.fire)
    try:
        yield
    except asyncio.CancelledError:
        if backstop.fired and task.uncancel() <= backstop.cancelling:
            raise deadline_exceeded() from None
        raise
    finally:
        timer.cancel()


class _Backstop:
    """Ends a handler that overran, as asyncio.timeout does."""

    __slots__ = ("_task", "cancelling", "fired")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self._task = task
        self.fired = False
        self.cancelling = task.cancelling()

    def fire(self) -> None:
        self.fired = True
        self._task.cancel()


def _typed(error: Exception, method: str) -> SluiceError:
    """The typed error for whatever a handler raised; logs what is not one."""
    for leaf in _leaves(error):
        if isinstance(leaf, SluiceError):
            return leaf
        if isinstance(leaf, FrameBroken):
            return leaf.to_error()
        if isinstance(leaf, NotImplementedError):
            return _METHOD_NOT_AVAILABLE
        if isinstance(leaf, grpc.aio.AioRpcError):
            inner = from_rpc_error(leaf)
            if not inner.reason.startswith("PEER_") or inner.code in _PASSED_ON:
                return inner
    log.failure("handler failed", error, method=method)
    return internal(context.request_id.get())


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The exceptions in a group (a TaskGroup raises those), the typed ones first."""
    if not isinstance(error, BaseExceptionGroup):
        yield error
        return
    leaves: list[BaseException] = []
    stack: list[BaseException] = [error]
    while stack:
        item = stack.pop()
        if isinstance(item, BaseExceptionGroup):
            stack.extend(reversed(item.exceptions))
        else:
            leaves.append(item)
    yield from sorted(leaves, key=lambda leaf: not isinstance(leaf, SluiceError))


async def _abort(call_context: Context, error: SluiceError) -> NoReturn:
    # The request id makes a refusal findable; the library sends trailers only when no message and
    # no initial metadata went before.
    metadata = (*trailers(complete(error)), (REQUEST_ID_KEY, context.request_id.get()))
    await call_context.abort(grpc_code(error.code), error.message[:TEXT_CHARS_MAX], metadata)


async def _tell_cancelled(call_context: Context) -> None:
    """Ends a call whose handler's task was cancelled. When the client cancelled, this has no
    effect; when the server is stopping or the handler was cancelled from inside, it does."""
    error = complete(unavailable("CALL_CANCELLED", "The server ended this call."))
    with contextlib.suppress(grpc.aio.BaseError, grpc.aio.AbortError):
        await call_context.abort(grpc_code(error.code), error.message, trailers(error))
