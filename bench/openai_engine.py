"""The simulated engine behind an OpenAI-shaped HTTP/1.1 server, as vLLM is behind its own.

Run as a process for each instance: ``python -m bench.openai_engine --profile FILE``; prints
``{"port": N}`` when it listens and ends on SIGTERM. The engine is that of inference_svc with the
profile's settings: the same steps, batch, KV memory and prefill as our own instances have.

What a bare vLLM does and our instances do not need to: requests beyond the batch wait in the
engine, first come first served, without a bound and without a deadline; one whose reader goes away
is aborted. Streamed answers have their head at once and then one server-sent event in its own HTTP
chunk for each token (a role event with the first, ``[DONE]`` last). Routes: chat completions and
completions, streamed or whole, and what gateways poll (``/health``, ``/v1/models``, ``/version``,
``/metrics``).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvloop

from bench.mock_openai import Connection, response
from bench.overload_profile import PROFILE, read_profile
from inference_svc.adapters.simulated.engine import SimulatedEngine
from inference_svc.adapters.simulated.profile import SimulatedProfile
from inference_svc.ports import (
    ChatPrompt,
    FinishReason,
    GenerateSpec,
    GenerationEnd,
    Prompt,
    RunningRequest,
    Sampling,
    TextPrompt,
    TokenLogprob,
    TokenPrompt,
)
from sluice.errors import Code, SluiceError

MODEL = "simulated"
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as OpenAI has it
CREATED = 1790000000

_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_STATUS = {
    Code.INVALID_ARGUMENT: b"400 Bad Request",
    Code.UNAVAILABLE: b"503 Service Unavailable",
}


class Generation:
    """One request's answer: the engine's sink, and what the connection may drop."""

    def __init__(self, transport: asyncio.Transport, number: int, *, chat: bool, stream: bool):
        self._transport = transport
        self._chat = chat
        self._stream = stream
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{number:032x}"
        self._parts: list[str] = []
        self._begun = False
        self.running: RunningRequest | None = None
        self.dropped = False

    def accepted(self, running: RunningRequest) -> None:
        """The engine has queued it."""
        self.running = running
        if self._stream:
            self._transport.write(_HEAD)

    def drop(self) -> None:
        """The reader has gone: the engine stops."""
        self.dropped = True
        if self.running is not None:
            self.running.abort(FinishReason.CANCELLED)

    def delta(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        position: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> None:
        """See OutputSink."""
        if self.dropped:
            return
        if not self._stream:
            self._parts.append(text)
            return
        self._write(self._choice(text, None))

    def ended(self, end: GenerationEnd) -> None:
        """See OutputSink."""
        if self.dropped:
            return
        reason = end.outputs[0].reason.value
        if end.error is not None:
            self._transport.abort()  # as a crashed vLLM would
        elif self._stream:
            self._write(self._choice("", "length" if reason == "length" else "stop"))
            self._transport.write(_DONE)
        else:
            usage = {"prompt_tokens": end.prompt_tokens, "completion_tokens": end.completion_tokens}
            usage["total_tokens"] = sum(usage.values())
            body = {**self._choice("".join(self._parts), reason, whole=True), "usage": usage}
            data = json.dumps(body).encode()
            self._transport.write(response(b"200 OK", data, b"application/json"))
        self.dropped = True

    def fail(self, error: SluiceError) -> None:
        """It was refused before it began."""
        if not self.dropped:
            body = json.dumps({"error": {"message": str(error), "type": error.reason}}).encode()
            status = _STATUS.get(error.code, b"500 Internal Server Error")
            self._transport.write(response(status, body, b"application/json"))
            self.dropped = True

    def _write(self, event: Mapping[str, object]) -> None:
        data = _chunk(event)
        if not self._begun:
            self._begun = True
            if self._chat:
                data = _chunk(self._choice("", None, role="assistant")) + data
        self._transport.write(data)

    def _choice(
        self, text: str, finish: str | None, *, whole: bool = False, role: str = ""
    ) -> dict[str, object]:
        choice: dict[str, object] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self._chat and whole:
            choice["message"] = {"role": "assistant", "content": text}
        elif self._chat:
            choice["delta"] = {"role": role, "content": ""} if role else {"content": text}
        else:
            choice["text"] = text
        kind = "chat.completion" if self._chat else "text_completion"
        if self._chat and not whole:
            kind += ".chunk"
        return {
            "id": self._id,
            "object": kind,
            "created": CREATED,
            "model": MODEL,
            "choices": [choice],
        }


def _chunk(event: Mapping[str, object]) -> bytes:
    data = b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


class Server:
    """The routes; implements ``bench.mock_openai.Answering``."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.requests = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def answer(self, path: str) -> bytes:
        """The whole response to a plain GET; 404 as vLLM says it for what it does not have."""
        if path == "/health":
            return response(b"200 OK", b"", b"text/plain")
        if path == "/metrics":
            return response(b"200 OK", self._metrics(), b"text/plain; version=0.0.4")
        if path == "/v1/models":
            length = self.engine.profile.context_tokens
            model = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "vllm"}
            models = {"object": "list", "data": [{**model, "root": MODEL, "max_model_len": length}]}
            return response(b"200 OK", json.dumps(models).encode(), b"application/json")
        if path == "/version":
            return response(b"200 OK", b'{"version":"0.32.0"}', b"application/json")
        return response(b"404 Not Found", b'{"detail":"Not Found"}', b"application/json")

    def generate(self, transport: asyncio.Transport, path: str, body: bytes) -> Generation | None:
        """Begins a completion; what the engine refuses is answered when it has looked."""
        chat = path == "/v1/chat/completions"
        if not chat and path != "/v1/completions":
            transport.write(self.answer(path))
            return None
        self.requests += 1
        try:
            asked = json.loads(body)
            prompt, sampling = _read(asked, chat=chat)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = {"error": {"message": f"not a request: {error!r}"}}
            data = json.dumps(problem).encode()
            transport.write(response(b"400 Bad Request", data, b"application/json"))
            return None
        stream = bool(asked.get("stream"))
        generation = Generation(transport, self.requests, chat=chat, stream=stream)
        spec = GenerateSpec(str(self.requests), prompt, sampling)
        task = asyncio.get_running_loop().create_task(self._run(generation, spec))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    async def _run(self, generation: Generation, spec: GenerateSpec) -> None:
        try:
            prepared = await self.engine.prepare(spec)
            if not generation.dropped:
                generation.accepted(self.engine.submit(prepared, generation))
        except SluiceError as error:
            generation.fail(error)

    def _metrics(self) -> bytes:
        stats = self.engine.stats()
        used, free = stats.kv_tokens_used or 0, stats.kv_tokens_free or 0
        values = {
            "num_requests_running": stats.running or 0,
            "num_requests_waiting": stats.waiting or 0,
            "kv_cache_usage_perc": used / max(1, used + free),
        }
        lines = [
            f"# TYPE vllm:{name} gauge\n"
            f'vllm:{name}{{engine="0",model_name="{MODEL}"}} {float(value)}\n'
            for name, value in values.items()
        ]
        return "".join(lines).encode()


def _read(asked: Mapping[str, Any], *, chat: bool) -> tuple[Prompt, Sampling]:
    """Prompt and sampling of a request body. KeyError, TypeError or ValueError for a wrong one."""
    prompt: Prompt
    if chat:
        prompt = ChatPrompt(tuple(asked["messages"]))
    elif isinstance(asked["prompt"], str):
        prompt = TextPrompt(asked["prompt"])
    else:
        prompt = TokenPrompt(tuple(int(token) for token in asked["prompt"]))
    limit = asked.get("max_completion_tokens") or asked.get("max_tokens")
    if limit is None and not chat:
        limit = DEFAULT_MAX_TOKENS
    sampling = Sampling(
        temperature=asked.get("temperature"),
        max_tokens=None if limit is None else int(limit),
        ignore_eos=bool(asked.get("ignore_eos")),
        seed=asked.get("seed"),
    )
    return prompt, sampling


async def start(
    host: str, port: int, profile: SimulatedProfile
) -> tuple[asyncio.Server, SimulatedEngine]:
    """Listens; the first socket of the asyncio server tells the port."""
    engine = SimulatedEngine(profile)
    await engine.start()
    server = Server(engine)
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: Connection(server), host, port, backlog=4096), engine


async def serve(host: str, port: int, profile: SimulatedProfile) -> None:
    """Serves until SIGTERM or SIGINT."""
    listening, engine = await start(host, port, profile)
    ending = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ending.set)
    print(json.dumps({"port": listening.sockets[0].getsockname()[1]}), flush=True)
    await ending.wait()
    listening.close()
    await engine.close()


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--profile", type=Path, default=PROFILE)
    arguments = parser.parse_args()
    profile = SimulatedProfile.from_table(MODEL, read_profile(arguments.profile).engine)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(arguments.host, arguments.port, profile))
    return 0


if __name__ == "__main__":
    sys.exit(main())
