"""The `sluice` command against a whole mesh of real services on the simulated engine.

Goal: what a newcomer types works as the command prints it, every answer says that it is simulated,
and every refusal is one line with its exit status. Method: one mesh for the module, on ports of its
own; commands run as processes. Oracle: exit status, output, and the mesh's own answers.

Seen to fail on mutants: `cli_support._status_of_code` returning 1 always, `cli_calls._label` doing
nothing, `cli_calls.chat` forgetting the assistant's messages, `grant` signing for another instance.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.command.client import MeshClient
from sluice.command.up_screen import CALLS_END, CALLS_START
from sluice.common.v1 import input_pb2, sampling_pb2
from sluice.scheduler.v1 import generate_pb2
from tests.hermetic.local_mesh import LocalMesh, kill, local_mesh, until

LABEL = "SIMULATED answer"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalMesh, str]]:
    with local_mesh(tmp_path_factory.mktemp("mesh"), stand_ins=False) as mesh:
        mesh.environ["ENGINE"] = "simulated"
        done = mesh.run("up", "--instances", "2")
        assert done.returncode == 0, done.stdout + done.stderr
        yield mesh, done.stdout


@pytest.fixture
def mesh(started: tuple[LocalMesh, str]) -> LocalMesh:
    return started[0]


def type_in(mesh: LocalMesh, *arguments: str, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        mesh.command(arguments),
        input=text,
        env=mesh.environ,
        cwd=mesh.root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_up_asks_a_question_through_envoy_and_labels_the_answer(
    started: tuple[LocalMesh, str],
) -> None:
    mesh, said = started
    assert "What is the capital of France?" in said
    assert f"through Envoy at 127.0.0.1:{mesh.port}" in said
    assert "Answer (SIMULATED):" in said
    assert "(SIMULATED, smollm2-135m-instruct on chat-" in said


def test_the_calls_that_up_prints_work_as_they_are_typed(started: tuple[LocalMesh, str]) -> None:
    mesh, said = started
    block = said[said.index(CALLS_START) : said.rindex(CALLS_END)]
    assert all(tool in block for tool in ("grpcurl", "curl", "import grpc"))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block + CALLS_END],
        env=mesh.environ,
        cwd=mesh.root,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert '"finished": {' in done.stdout  # grpcurl
    assert '"simulated":true' in done.stdout  # curl


def test_generate_streams_text_and_says_that_it_is_simulated(mesh: LocalMesh) -> None:
    done = mesh.run("generate", "Hello", "--max-tokens", "8", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert LABEL in done.stderr
    whole = mesh.run("generate", "Hello", "--max-tokens", "8", "--temperature", "0", "--no-stream")
    assert whole.stdout == done.stdout
    assert LABEL in whole.stderr
    for one in (done, whole):
        assert "[stopped after 8 tokens; --max-tokens permits more]" in one.stderr


def test_generate_reads_standard_input_and_prints_json(mesh: LocalMesh) -> None:
    done = type_in(mesh, "generate", "-", "--json", "--max-tokens", "4", text="Hello")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["simulated"] is True
    assert answer["usage"]["completion_tokens"] == 4
    # Defaults too, as the JSON API writes them.
    assert answer["cost"] == 0
    assert answer["outputs"][0]["finish"]["stop_string"] == ""


def test_a_json_schema_is_followed(mesh: LocalMesh, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object", "properties": {"n": {"type": "integer"}}}')
    done = mesh.run("generate", "Hello", "--json-schema", str(schema), "--max-tokens", "200")
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout), dict)


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--top-p", "2"), 4, ("INVALID_ARGUMENT", "sampling.top_p")),
        (("--temperature", "9"), 2, ("--temperature",)),
        (("--model", "nope"), 4, ("NOT_FOUND",)),
        (("--timeout", "0.02"), 6, ("DEADLINE_EXCEEDED",)),
        (("--class", "urgent"), 2, ("--class", "critical, interactive")),
        (("--max-tokens", "0"), 2, ("max-tokens",)),
        (("--max-tokens", "2147483648"), 2, ("max-tokens",)),
        (("--key-file", "/nowhere/key"), 2, ("/nowhere/key",)),
        (("--endpoint", "127.0.0.1:1"), 3, ("nothing answers at 127.0.0.1:1",)),
        (("--config", "/nowhere/sluice.toml"), 2, ("/nowhere/sluice.toml",)),
    ],
)
def test_a_refusal_is_one_line_and_a_documented_status(
    mesh: LocalMesh, arguments: tuple[str, ...], status: int, words: tuple[str, ...]
) -> None:
    done = mesh.run("generate", "Hello", *arguments)
    assert done.returncode == status, done.stderr
    lines = [line for line in done.stderr.splitlines() if LABEL not in line]
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert all(word in lines[0] for word in words), lines[0]


def test_a_wrong_key_is_refused_with_its_reason(mesh: LocalMesh) -> None:
    mesh.environ["SLUICE_API_KEY"] = "sk-wrong"
    try:
        done = mesh.run("generate", "Hello")
    finally:
        del mesh.environ["SLUICE_API_KEY"]
    assert done.returncode == 4
    assert "UNAUTHENTICATED" in done.stderr


def answer_to(mesh: LocalMesh, *turns: tuple[str, str]) -> str:
    key = (mesh.runtime / "api-key").read_text().strip()
    request = generate_pb2.GenerateTextRequest(
        messages=[input_pb2.ChatMessage(role=role, content=content) for role, content in turns],
        sampling=sampling_pb2.SamplingParams(temperature=0.0, max_tokens=6),
    )
    with MeshClient(f"127.0.0.1:{mesh.port}", key) as client:
        return client.generate_text(request, 20.0).text


def test_chat_sends_the_conversation_so_far_and_forgets_it_on_reset(mesh: LocalMesh) -> None:
    # The simulated text is a function of the whole conversation.
    first = answer_to(mesh, ("user", "Hello"))
    second = answer_to(mesh, ("user", "Hello"), ("assistant", first), ("user", "Bye"))
    assert second != answer_to(mesh, ("user", "Hello"), ("user", "Bye"))
    typed = "Hello\n\nBye\n/reset\nHello\n/exit\nnever sent\n"
    done = type_in(mesh, "chat", "--max-tokens", "6", "--temperature", "0", text=typed)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{first}\n{second}\n{first}\n"
    assert done.stderr.count(LABEL) == 3


def test_models_lists_what_is_served(mesh: LocalMesh) -> None:
    done = mesh.run("models")
    assert done.returncode == 0, done.stderr
    assert "smollm2-135m-instruct (default)" in done.stdout
    assert "embeds (384 dimensions)" in done.stdout


def test_status_shows_the_load_of_each_instance(mesh: LocalMesh) -> None:
    done = mesh.run("status")
    assert done.returncode == 0, done.stderr
    for name in ("chat-0", "chat-1", "embed-0"):
        lines = [line for line in done.stdout.splitlines() if line.startswith(name)]
        assert len(lines) == 2, done.stdout
        assert "SIMULATED" in lines[1]
    assert "Answers of this mesh are SIMULATED." in done.stdout


def call_instance(mesh: LocalMesh, grant: str) -> subprocess.CompletedProcess[str]:
    work = (
        '"work": {"requestId": "debug", "input": {"text": "Hello"}, "sampling": {"maxTokens": 2}}'
    )
    body = f'{{{work}, "grant": {grant}}}' if grant else f"{{{work}}}"
    address = mesh.record("chat-0").ports["api"]
    grpcurl = shlex.quote(str(Path(sys.executable).with_name("grpcurl")))
    return subprocess.run(
        ["bash", "-c", f"{grpcurl} -plaintext -d @ {address} {SERVICE}/Generate"],
        input=body,
        env=mesh.environ,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


SERVICE = "sluice.inference.v1.InferenceService"


def test_a_grant_opens_an_instance_that_is_closed_without_it(mesh: LocalMesh) -> None:
    without = call_instance(mesh, "")
    assert "PermissionDenied" in without.stderr
    granted = mesh.run("grant", "--instance", "chat-0", "--ttl", "60")
    assert granted.returncode == 0, granted.stderr
    done = call_instance(mesh, granted.stdout)
    assert done.returncode == 0, done.stderr
    assert '"ended"' in done.stdout
    other = mesh.run("grant", "--instance", "chat-1")
    assert "PermissionDenied" in call_instance(mesh, other.stdout).stderr


@pytest.mark.parametrize("form", ["json", "base64"])
@pytest.mark.parametrize("instance", ["*", "chat-1", "embed-0"])
def test_the_call_that_grant_prints_works_as_it_is_typed(
    mesh: LocalMesh, form: str, instance: str
) -> None:
    minted = mesh.run("grant", "--instance", instance, "--format", form)
    assert minted.returncode == 0, minted.stderr
    _, _, call = minted.stderr.partition("\n\n")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", call],
        env=mesh.environ,
        cwd=mesh.root,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ("embeddings" if instance == "embed-0" else "ended") in done.stdout


def test_a_grant_for_an_instance_that_is_not_there_is_refused(mesh: LocalMesh) -> None:
    done = mesh.run("grant", "--instance", "chat-9")
    assert done.returncode == 2
    assert "chat-0, chat-1, embed-0" in done.stderr
    assert not done.stdout


def test_a_slip_in_the_configuration_hides_no_running_mesh(mesh: LocalMesh, tmp_path: Path) -> None:
    wrong = tmp_path / "sluice.toml"
    wrong.write_text('[mesh]\nlog_level = "loud"\n')
    for command in (("status",), ("logs",), ("models",), ("generate", "Hello")):
        done = mesh.run(*command, "--config", str(wrong))
        assert done.returncode == 0, done.stderr
        assert "warning: mesh.log_level" in done.stderr
        assert done.stdout.strip()


def test_a_tenant_that_is_added_may_call_until_it_is_removed(mesh: LocalMesh) -> None:
    added = mesh.run("tenants", "add", "team-a", "--class", "batch")
    assert added.returncode == 0, added.stderr
    assert "team-a" in mesh.run("tenants", "list").stdout
    again = mesh.run("tenants", "add", "team-a")
    assert again.returncode != 0
    assert "Traceback" not in again.stderr
    key = mesh.runtime / "api-key-team-a"
    call = ("generate", "Hello", "--max-tokens", "2", "--key-file", str(key))
    until(lambda: mesh.run(*call).returncode == 0, "the key is known")
    changed = mesh.run("tenants", "set", "team-a", "--model", "another", "--concurrent", "3")
    assert changed.returncode == 0, changed.stderr
    until(lambda: "MODEL_UNKNOWN" in mesh.run(*call).stderr, "the model is refused")
    assert mesh.run("tenants", "set", "team-a", "--model", "none").returncode == 0
    second = mesh.run("tenants", "key-add", "team-a", "--label", "next", "--expires", "1h")
    key_id, secret = second.stdout.split()
    key.write_text(secret)
    until(lambda: mesh.run(*call).returncode == 0, "the second key is known")
    assert "next" in mesh.run("tenants", "keys", "team-a").stdout
    assert mesh.run("tenants", "key-revoke", key_id).returncode == 0
    until(lambda: "KEY_UNKNOWN" in mesh.run(*call).stderr, "the key is void")
    own = mesh.run("tenants", "remove", "dev")
    assert "key of `sluice` itself" in own.stderr
    mesh.run("tenants", "key-add", "team-a")
    copy = key.with_name("copy")
    copy.write_text(key.read_text())
    assert mesh.run("tenants", "remove", "team-a").returncode == 0
    assert not key.exists()
    refused = (*call[:-1], str(copy))
    until(lambda: "KEY_UNKNOWN" in mesh.run(*refused).stderr, "the key is refused")


def test_an_alias_is_set_taken_back_and_refused_by_field(mesh: LocalMesh) -> None:
    model = "smollm2-135m-instruct"
    assert mesh.run("alias", "set", "chat", f"{model}=3").returncode == 0
    until(
        lambda: mesh.run("generate", "Hi", "--max-tokens", "2", "--model", "chat").returncode == 0,
        "the alias is known",
    )
    assert f"{model}=3" in mesh.run("alias", "list").stdout
    wrong = mesh.run("alias", "set", "chat", "no-such-model")
    assert "targets[0].model" in wrong.stderr
    assert mesh.run("alias", "set", "chat", model).returncode == 0
    back = mesh.run("alias", "rollback", "chat")
    assert f"{model}=3" in back.stdout
    assert "ALIAS_UNKNOWN" in mesh.run("alias", "rollback", "nothing").stderr
    assert "chat is removed" in mesh.run("alias", "remove", "chat").stdout
    until(lambda: "chat" not in mesh.run("alias", "list").stdout.split(), "the alias is gone")
    assert "ALIAS_UNKNOWN" in mesh.run("alias", "remove", "chat").stderr


def test_a_drained_instance_gets_nothing_until_it_is_undone(mesh: LocalMesh) -> None:
    assert "chat-0: draining" in mesh.run("drain", "chat-0").stdout
    assert "draining" in mesh.run("status").stdout
    assert "INSTANCE_UNKNOWN" in mesh.run("drain", "chat-9").stderr
    assert "chat-0: serving" in mesh.run("drain", "chat-0", "--undo").stdout
    assert mesh.run("generate", "Hello", "--max-tokens", "2").returncode == 0


def test_every_setting_is_printed_with_its_default_and_range(mesh: LocalMesh) -> None:
    done = mesh.run("config")
    assert done.returncode == 0, done.stderr
    for section in ("mesh", "local", "envoy", "scheduler", "execution", "inference", "state"):
        assert f"[{section}]" in done.stdout
    assert "SLUICE_ENVOY_PORT" in done.stdout
    assert f"port = {mesh.port}  (environment; default 8080; 1 to 65535)" in done.stdout


def test_access_lines_are_short_and_without_those_that_only_look(mesh: LocalMesh) -> None:
    assert mesh.run("generate", "Hello", "--max-tokens", "2").returncode == 0
    until(
        lambda: "SchedulerService/Generate 200  grpc_status=0 " in mesh.run("logs", "envoy").stdout,
        "the access log",
    )
    assert mesh.run("status").returncode == 0
    until(
        lambda: "WatchStatus" in mesh.run("logs", "envoy", "--all").stdout,
        "the line of the report",
    )
    assert "WatchStatus" not in mesh.run("logs", "envoy").stdout
    assert "statically linked extensions" not in mesh.run("logs", "envoy", "--raw").stdout


def test_logs_are_readable_lines(mesh: LocalMesh) -> None:
    done = mesh.run("logs", "scheduler")
    assert done.returncode == 0, done.stderr
    assert " INFO " in done.stdout
    times = [line.split()[1][:23] for line in mesh.run("logs").stdout.splitlines()]
    assert len(times) > 10
    assert times == sorted(times)
    missing = mesh.run("logs", "nobody")
    assert missing.returncode == 2
    assert "chat-0" in missing.stderr


@pytest.mark.parametrize("name", ["scheduler", "execution", "chat-0", "envoy"])
def test_the_mesh_answers_again_after_a_process_was_killed(mesh: LocalMesh, name: str) -> None:
    killed = mesh.record(name).pid
    kill(killed)
    until(lambda: mesh.record(name).pid not in (0, killed), f"{name} is started again")

    def answers() -> bool:
        done = mesh.run("generate", "Hello", "--max-tokens", "2", "--timeout", "5")
        return done.returncode == 0

    until(answers, "an answer", limit_s=40)
