"""`sluice generate`, `chat`, `models`: calls that a client could make, from the shell.

A simulated answer is labelled on standard error, so that a pipe gets the text alone and a person
always sees the label.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.table import Table
from rich.text import Text

from sluice.command.cli_support import (
    ConfigOption,
    EndpointOption,
    KeyFileOption,
    errors,
    is_interactive,
    open_client,
    output,
    print_table,
    status_of,
)
from sluice.command.schema_files import schema_text
from sluice.errors import Code, SluiceError
from sluice.sampling_rules import TEMPERATURE_MAX

if TYPE_CHECKING:
    from sluice.command.client import MeshClient
    from sluice.common.v1 import policy_pb2
    from sluice.scheduler.v1 import generate_pb2

SIMULATED_LABEL: Final = "[SIMULATED answer: made up by a latency model, not by a language model]"
TIMEOUT_S: Final = 300.0
# A first token usually comes sooner; a silent terminal looks broken.
PATIENCE_S: Final = 2.0
INT32_MAX: Final = (1 << 31) - 1
CLASSES: Final = ("critical", "interactive", "standard", "batch")

ModelOption = Annotated[str, typer.Option(help="Model or alias. Default: the deployment's.")]
MaxTokensOption = Annotated[
    int | None, typer.Option(help="Most output tokens, 1 or more.", min=1, max=INT32_MAX)
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(help="0 (greedy) to 2. Default: the model's.", min=0.0, max=TEMPERATURE_MAX),
]
SystemOption = Annotated[str, typer.Option(help="A system message before the conversation.")]
TimeoutOption = Annotated[float, typer.Option(help="Deadline, in s.", min=0.001)]
ClassOption = Annotated[
    str, typer.Option("--class", help=f"Priority: {', '.join(CLASSES)}. Default: the tenant's.")
]


def calls(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(generate)
    app.command()(chat)
    app.command()(models)


def generate(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads standard input.")],
    model: ModelOption = "",
    system: SystemOption = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    top_p: Annotated[float | None, typer.Option(help="More than 0, to 1.")] = None,
    top_k: Annotated[int | None, typer.Option(help="0 (all) or more.", min=0)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random numbers.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Ends the output; repeatable.")] = None,
    json_schema: Annotated[
        Path | None, typer.Option(help="File with a JSON schema that the output must follow.")
    ] = None,
    priority: ClassOption = "",
    stream: Annotated[bool, typer.Option(help="Print text as it comes.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole response as JSON; implies no stream.")
    ] = False,
    timeout: TimeoutOption = TIMEOUT_S,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Ask the model once."""
    from sluice.common.v1 import sampling_pb2
    from sluice.scheduler.v1 import generate_pb2

    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = sampling_pb2.SamplingParams(
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop or ()
    )
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    if json_schema is not None:
        sampling.structured_output.json_schema = schema_text(json_schema, "--json-schema")
    request = generate_pb2.GenerateRequest(
        model=model, sampling=sampling, priority_class=class_number(priority)
    )
    if system:
        request.messages.add(role="system", content=system)
        request.messages.add(role="user", content=text)
    else:
        request.prompt = text
    with open_client(config, endpoint, key_file) as client:
        if stream and not as_json:
            _print_stream(client, request, timeout)
        else:
            _print_whole(client, request, timeout, as_json)


def chat(
    model: ModelOption = "",
    system: SystemOption = "",
    max_tokens: MaxTokensOption = None,
    temperature: TemperatureOption = None,
    session: Annotated[
        str,
        typer.Option(
            help="Keep the conversation in the mesh: `--session` begins a session, `--session ID`"
            " goes on with one."
        ),
    ] = "",
    timeout: TimeoutOption = TIMEOUT_S,
    config: ConfigOption = None,
    endpoint: EndpointOption = "",
    key_file: KeyFileOption = None,
) -> None:
    """Talk with the model; answers stream. The conversation is kept here and sent with each turn,
    or with --session in the mesh."""
    from sluice.common.v1 import sampling_pb2
    from sluice.scheduler.v1 import generate_pb2

    sampling = sampling_pb2.SamplingParams(temperature=temperature)
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    if session:
        from sluice.command.cli_sessions import SessionChat, chat_in_session

        with open_client(config, endpoint, key_file) as client:
            kept = SessionChat(client, model, sampling, system, timeout)
            raise typer.Exit(chat_in_session(kept, session, _turns()))
    request = generate_pb2.GenerateRequest(model=model, sampling=sampling)
    if system:
        request.messages.add(role="system", content=system)
    first = len(request.messages)
    if is_interactive():
        output().print("An empty line is ignored; /reset forgets, /exit or Ctrl-D ends.")
    with open_client(config, endpoint, key_file) as client:
        for line in _turns():
            if line == "/reset":
                del request.messages[first:]
                continue
            request.messages.add(role="user", content=line)
            answer = _turn(client, request, timeout)
            if answer is None:
                # Unanswered: the next turn must not send it again.
                del request.messages[-1]
            else:
                request.messages.add(role="assistant", content=answer)


def models(
    config: ConfigOption = None, endpoint: EndpointOption = "", key_file: KeyFileOption = None
) -> None:
    """List the models that the key may use."""
    with open_client(config, endpoint, key_file) as client:
        answer = client.list_models()
    table = Table(box=None, pad_edge=False)
    for column in ("model", "does", "context", "available", "engine", "aliases"):
        table.add_column(column, overflow="fold", no_wrap=column == "model")
    for one in answer.models:
        does = "generates" if one.generates else f"embeds ({one.embedding_dimensions} dimensions)"
        table.add_row(
            Text(one.name + (" (default)" if one.is_default else "")),
            does,
            f"{one.context_tokens} tokens",
            f"yes, instances: {one.instances}" if one.available else "no",
            Text(one.engine + (" SIMULATED" if one.simulated else "")),
            Text(", ".join(one.aliases)),
        )
    print_table(table)


def _turns() -> Iterator[str]:
    """Lines of the person, without empty ones, until the end of input or /exit."""
    if is_interactive():
        # Gives input() editing and a history, where there is one.
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401
    while True:
        try:
            line = input("> " if is_interactive() else "").strip()
        except EOFError:
            return
        if line == "/exit":
            return
        if line:
            yield line


def _turn(client: MeshClient, request: generate_pb2.GenerateRequest, timeout: float) -> str | None:
    """One turn; None when it was not answered. An answer that was interrupted counts as given."""
    pieces: list[str] = []
    try:
        _print_stream(client, request, timeout, pieces)
    except SluiceError as error:
        if error.code is Code.UNAUTHENTICATED or not is_interactive():
            raise
        status_of(error)
        return None
    except KeyboardInterrupt:
        # Stops this answer, as people expect; at the prompt it ends the command.
        output().print()
        return "".join(pieces) or None
    return "".join(pieces)


def _print_stream(
    client: MeshClient,
    request: generate_pb2.GenerateRequest,
    timeout: float,
    pieces: list[str] | None = None,
) -> None:
    from sluice.command.log_files import printable

    open_line, finished = False, None
    try:
        for message in _announced(client.generate(request, timeout)):
            match message.WhichOneof("event"):
                case "started" if message.started.simulated:
                    _label()
                case "finished":
                    finished = message.finished
                case "delta":
                    open_line = True
                    text = message.delta.text
                    if pieces is not None:
                        pieces.append(text)
                    # To a pipe as it is; a terminal must not be steered by a model.
                    typer.echo(printable(text) if sys.stdout.isatty() else text, nl=False)
                    sys.stdout.flush()
    finally:
        if open_line:
            typer.echo()
    if finished is not None:
        reasons = [one.finish_reason for one in finished.outputs]
        _note_length(reasons, finished.usage.completion_tokens)


def _announced(
    messages: Iterator[generate_pb2.GenerateResponse],
) -> Iterator[generate_pb2.GenerateResponse]:
    """The messages; a person who waits for the first one is told why."""
    with _patience() as answered:
        for message in messages:
            answered()
            yield message


@contextlib.contextmanager
def _patience() -> Iterator[Callable[[], None]]:
    """Says after a while that the answer has not begun; yields what to call when it has."""

    def say() -> None:
        errors().print(Text("waiting for an instance ...", style="dim"))

    timer = threading.Timer(PATIENCE_S, say)
    timer.daemon = True
    if sys.stderr.isatty():
        timer.start()
    try:
        yield timer.cancel
    finally:
        timer.cancel()


def _note_length(reasons: Iterable[int], tokens: int) -> None:
    from sluice.common.v1 import result_pb2

    if result_pb2.FINISH_REASON_LENGTH in reasons:
        errors().print(
            Text(f"[stopped after {tokens} tokens; --max-tokens permits more]", style="dim"),
            soft_wrap=True,
        )


def _print_whole(
    client: MeshClient, request: generate_pb2.GenerateRequest, timeout: float, as_json: bool
) -> None:
    from google.protobuf import json_format

    from sluice.command.log_files import printable
    from sluice.scheduler.v1 import generate_pb2

    whole = generate_pb2.GenerateTextRequest(
        prompt=request.prompt,
        messages=request.messages,
        model=request.model,
        sampling=request.sampling,
        priority_class=request.priority_class,
    )
    with _patience():
        answer = client.generate_text(whole, timeout)
    if answer.simulated:
        _label()
    if as_json:
        # As the JSON API writes it: the protos' names, and defaults as such.
        document = json_format.MessageToDict(
            answer, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
        )
        typer.echo(json.dumps(document, ensure_ascii=False, indent=2))
    else:
        typer.echo(printable(answer.text) if sys.stdout.isatty() else answer.text)
        reasons = [one.finish.finish_reason for one in answer.outputs]
        _note_length(reasons, answer.usage.completion_tokens)


def _label() -> None:
    errors().print(Text(SIMULATED_LABEL, style="bold yellow"))


def class_number(name: str) -> policy_pb2.PriorityClass.ValueType:
    """The priority class of that word; UNSPECIFIED for an empty one. Raises BadParameter."""
    from sluice.common.v1 import policy_pb2

    if not name:
        return policy_pb2.PRIORITY_CLASS_UNSPECIFIED
    if name not in CLASSES:
        raise typer.BadParameter(
            f"{name!r} is not one of {', '.join(CLASSES)}", param_hint="--class"
        )
    return policy_pb2.PriorityClass.Value(f"PRIORITY_CLASS_{name.upper()}")
