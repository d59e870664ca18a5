"""What `sluice up` and `sluice down` say. Owns wording and layout; decides nothing.

Text from a model or a log is printed as it is: markup in it has no meaning.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from sluice.command import question
from sluice.command.client import MeshClient
from sluice.command.failures import UnreachableError, one_line
from sluice.command.first_files import api_key_path
from sluice.command.log_files import printable
from sluice.command.log_lines import readable
from sluice.command.run_files import RunPaths
from sluice.command.shutdown import Stopped
from sluice.command.topology import Topology
from sluice.errors import SluiceError
from sluice.mesh_config import Engine

SIMULATED = "SIMULATED"
LOG_CHARS_MAX = 400
# What stands between these can be copied into a shell as it is.
CALLS_START = "KEY="
CALLS_END = "PYTHON\n"
# By the reason of a refusal: what to do where the refusal does not say it.
ADVICE = {
    "NO_INSTANCE": "A drain outlasts a restart. Is one set? `sluice up --no-question`, then"
    " `sluice status` shows it and `sluice drain INSTANCE --undo` takes it back.",
}
METHOD = "sluice.scheduler.v1.SchedulerService/Generate"
SIMULATED_TEXT = (
    "The answers of this mesh are SIMULATED: a latency model makes them up.\n"
    "No language model runs, and no answer means anything.\n"
    "For a real model: make down && make up"
)


class UpScreen:
    """The terminal, or the file, that a person reads."""

    def __init__(self, console: Console, errors: Console) -> None:
        self.console = console
        self._errors = errors

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(Text(text), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Something to know; the start goes on."""
        self._errors.print(Text.assemble(("warning: ", "yellow"), text), soft_wrap=True)

    def failed(self, text: str) -> None:
        """Why it does not go on; one problem a line."""
        for line in text.splitlines():
            self._errors.print(Text.assemble(("error: ", "bold red"), line), soft_wrap=True)

    def warn_simulated(self) -> None:
        """Says loudly that nothing here is a model's answer."""
        self.console.print(
            Panel.fit(
                Text(SIMULATED_TEXT, style="bold"), title=SIMULATED, border_style="bold yellow"
            )
        )

    def starting(self, topology: Topology) -> None:
        """What comes now, and how long it usually takes."""
        models = ", ".join(f"{one.name} ({one.model})" for one in topology.instances)
        self.say(f"Starting {len(topology.processes)} processes; instances: {models}.")
        if any(one.engine is Engine.VLLM for one in topology.instances):
            self.say(f"vLLM on a {topology.device.value} usually takes about a minute.")

    def ask(self, topology: Topology, key: str) -> bool:
        """Asks the question through Envoy and prints the answer as it comes; whether it came."""
        self.say("")
        self.say(f"Question, through Envoy at {topology.endpoint}: {question.QUESTION}")
        label = f"Answer ({SIMULATED}): " if topology.simulated else "Answer: "
        self.console.print(Text(label, style="bold"), end="")
        try:
            with MeshClient(str(topology.endpoint), key) as client:
                answer = question.ask(client, self._piece)
        except SluiceError as error:
            self.say("")
            self.failed(f"the question was not answered: {one_line(error)}")
            if advice := ADVICE.get(error.reason):
                self.say(advice)
            return False
        except UnreachableError as error:
            self.say("")
            self.failed(f"the question was not answered: {error}")
            return False
        self.say("")
        kind = f"{SIMULATED}, " if answer.simulated else ""
        self.say(
            f"({kind}{answer.model} on {answer.instance}, {answer.completion_tokens} tokens in"
            f" {answer.seconds:.1f} s)"
        )
        return True

    def how_to(self, topology: Topology, paths: RunPaths) -> None:
        """How to call the mesh, and where to look."""
        key = short_path(api_key_path(paths.runtime))
        grpcurl = shlex.quote(tool_path("grpcurl"))
        # As people type it; gRPC, curl and browsers all resolve it to the listener.
        endpoint = str(topology.endpoint).replace("127.0.0.1:", "localhost:")
        prompt = f'{{"prompt":"{question.QUESTION}"}}'
        self.say("")
        if topology.simulated:
            self.say(f"The mesh is running; its answers are {SIMULATED}. Call it:")
        else:
            self.say("The mesh is running. Call it:")
        python = shlex.quote(short_path(Path(sys.executable)))
        authorization = '-H "authorization: Bearer $KEY"'
        lines = (
            "",
            f"{CALLS_START}$(cat {key})",
            "",
            f"{grpcurl} -plaintext {authorization} -d '{prompt}' {endpoint} {METHOD}",
            "",
            f"curl {authorization} -d '{prompt}' http://{endpoint}/chat",
            "",
            f"{python} - <<'PYTHON'\n{_python(endpoint, key)}{CALLS_END}",
        )
        self.console.print(Text("\n".join(lines), no_wrap=True), soft_wrap=True)
        command = tool_path("sluice")
        words = "chat | generate | agent | docs | status | logs"
        self.say(f"  {command} {words}    (more: {command} --help)")
        self.say(f"  logs: {short_path(paths.logs)}/    stop: make down")

    def stopped(self, result: Stopped, paths: RunPaths) -> None:
        """What `down` did."""
        if not result.was_running:
            self.say("No mesh is running.")
        elif result.left:
            self.failed(f"these processes could not be ended: {', '.join(result.left)}")
        else:
            self.say(f"The mesh has stopped ({result.seconds:.1f} s); no process is left.")
            if result.ended:
                self.say(f"{result.ended} of them did not end in order and had to be ended.")
            self.say(f"Logs stay in {short_path(paths.logs)}/")

    def log_tail(self, path: Path, lines: list[str]) -> None:
        """The end of a log."""
        if not lines:
            self._errors.print(Text(f"{path} is empty"), soft_wrap=True)
            return
        self._errors.print(Text(f"--- the last lines of {path}", style="dim"), soft_wrap=True)
        for line in lines:
            text = printable(readable(line))
            shown = text if len(text) <= LOG_CHARS_MAX else f"{text[: LOG_CHARS_MAX - 4]} ..."
            self._errors.print(Text(shown), soft_wrap=True)
        self._errors.print(Text("---", style="dim"))

    def _piece(self, text: str) -> None:
        self.console.print(Text(printable(text)), end="", soft_wrap=True)


def _python(endpoint: str, key: str) -> str:
    return (
        "import grpc\n"
        "from sluice.scheduler.v1 import generate_pb2, scheduler_pb2_grpc\n"
        f'channel = grpc.insecure_channel("{endpoint}")\n'
        "stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)\n"
        f'key = open("{key}").read().strip()\n'
        f'request = generate_pb2.GenerateRequest(prompt="{question.QUESTION}")\n'
        'for message in stub.Generate(request, metadata=[("authorization", f"Bearer {key}")]):\n'
        '    print(message.delta.text, end="", flush=True)\n'
    )


def short_path(path: Path) -> str:
    """Relative to the working folder when below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def tool_path(name: str) -> str:
    """As it can be typed here: by name when on PATH, else where the environment has it."""
    beside = Path(sys.executable).with_name(name)
    found = shutil.which(name)
    if found and (not beside.is_file() or Path(found).samefile(beside)):
        return name
    return short_path(beside) if beside.is_file() else name
