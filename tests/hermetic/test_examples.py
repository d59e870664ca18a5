"""Every example and the calls of the README, run as they are written.

Goal: what a newcomer copies works, whatever the question, and fails with a message and a status
when it must. Method: each file of examples/ as its own first lines say, and the README's calls
typed into a shell, against a mesh of real processes on the simulated engine; only address and key
file differ. The Node example is installed from its lock into a copy. Oracle: output and exit
status.

Seen to fail on mutants: a wrong method in the README's grpcurl line; examples/curl.sh without
`--fail-with-body`; examples/node/stream.mjs without its error handler; a new file in examples/.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.hermetic.local_mesh import ROOT
from tests.hermetic.mesh import Mesh

EXAMPLES = ROOT / "examples"
QUESTION = 'Say "hi", 龜: $HOME `id` it\'s 100%?'
LIMIT_S = 60.0
_KEY = '-H "authorization: Bearer $KEY"'
_BODY = '{"prompt":"What is the capital of France?"}'
_METHOD = "sluice.scheduler.v1.SchedulerService/Generate"
SMALLEST = (
    f"grpcurl -plaintext {_KEY} -d '{_BODY}' localhost:8080 {_METHOD}",
    f"curl {_KEY} -d '{_BODY}' localhost:8080/chat",
)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Node example, installed in a copy that lies as it does in the repository."""
    missing = [tool for tool in ("node", "npm") if shutil.which(tool) is None]
    assert not missing, f"please install {missing}: the Node example is part of what is promised"
    copy = tmp_path_factory.mktemp("node")
    image = "protos/build/sluice.binpb"
    (copy / image).parent.mkdir(parents=True)
    shutil.copy(ROOT / image, copy / image)
    folder = copy / "examples" / "node"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "stream.mjs"


@pytest.fixture
def commands(request: pytest.FixtureRequest) -> Mapping[str, Sequence[str]]:
    """How each example is started, by its path in examples/."""
    return {
        "curl.sh": [str(EXAMPLES / "curl.sh")],
        "grpcurl.sh": [str(EXAMPLES / "grpcurl.sh")],
        "stream.py": [sys.executable, str(EXAMPLES / "stream.py")],
        "errors.py": [sys.executable, str(EXAMPLES / "errors.py")],
        "node/stream.mjs": ["node", str(request.getfixturevalue("node"))],
    }


def environment(mesh: Mesh, key_file: Path | None = None) -> dict[str, str]:
    """Address and key by the examples' own variables; the environment's tools come first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        "PATH": path,
        "HOME": os.environ.get("HOME", "/"),
        "SLUICE_ENDPOINT": mesh.target,
        "SLUICE_KEY_FILE": str(key_file or mesh.runtime / "api-key"),
    }


def run(command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        env=dict(environ),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def documents(text: str) -> Iterator[dict[str, object]]:
    """The JSON objects that follow one another in a text."""
    decoder = json.JSONDecoder()
    while text := text.lstrip():
        found, end = decoder.raw_decode(text)
        assert isinstance(found, dict)
        yield found
        text = text[end:]


def is_stream(messages: Sequence[Mapping[str, object]]) -> None:
    """`started`, then deltas, then one `finished` that says it is simulated."""
    kinds = [next(iter(message.keys() - {"sequence"})) for message in messages]
    assert kinds[0] == "started"
    assert kinds[-1] == "finished"
    assert set(kinds[1:-1]) == {"delta"}
    finished = messages[-1]["finished"]
    assert isinstance(finished, dict)
    assert finished["simulated"] is True


# What starts runs, in test_agent_examples.py; the server of tools in tests/unit/agent.
ELSEWHERE = {
    "mcp_tickets.py",
    "runs_curl.sh",
    "runs_grpcurl.sh",
    "sql_analyst/make_database.py",
    "sql_analyst/sql_analyst.py",
    "support_agent/support_agent.py",
}
DATA = (".json", ".sql", ".md", ".html", ".txt")


def test_every_example_is_run(commands: Mapping[str, Sequence[str]]) -> None:
    there = {
        str(path.relative_to(EXAMPLES))
        for path in EXAMPLES.rglob("*")
        if path.is_file() and "node_modules" not in path.parts and path.suffix not in DATA
    }
    assert there == commands.keys() | ELSEWHERE


def test_a_streamed_answer_with_the_python_stub(
    shared_mesh: Mesh, commands: Mapping[str, Sequence[str]]
) -> None:
    done = run([*commands["stream.py"], QUESTION], environment(shared_mesh))
    assert done.returncode == 0, done.stderr
    assert re.search(r".\n\[64 tokens on sim-0 \(SIMULATED\)\]\n$", done.stdout, re.DOTALL)


def test_a_streamed_answer_with_the_node_stub(
    shared_mesh: Mesh, commands: Mapping[str, Sequence[str]]
) -> None:
    """The same answer as Python's: both ask without randomness."""
    environ = environment(shared_mesh)
    done = run([*commands["node/stream.mjs"], QUESTION], environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == run([*commands["stream.py"], QUESTION], environ).stdout


def test_an_answer_with_curl(shared_mesh: Mesh, commands: Mapping[str, Sequence[str]]) -> None:
    done = run([*commands["curl.sh"], QUESTION], environment(shared_mesh))
    assert done.returncode == 0, done.stderr
    (answer,) = documents(done.stdout)
    assert answer["text"]
    assert answer["simulated"] is True


def test_a_streamed_answer_with_grpcurl(
    shared_mesh: Mesh, commands: Mapping[str, Sequence[str]]
) -> None:
    done = run([*commands["grpcurl.sh"], QUESTION], environment(shared_mesh))
    assert done.returncode == 0, done.stderr
    is_stream(list(documents(done.stdout)))


def test_a_refusal_that_is_read(shared_mesh: Mesh, commands: Mapping[str, Sequence[str]]) -> None:
    done = run(commands["errors.py"], environment(shared_mesh))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["code: INVALID_ARGUMENT", "reason: INVALID_FIELD"]
    assert lines[2].startswith("field: sampling.temperature: ")
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("example", "status", "word"),
    [
        ("curl.sh", 22, "KEY_UNKNOWN"),
        ("grpcurl.sh", 80, "Unauthenticated"),  # 64 + the code
        ("stream.py", 1, "UNAUTHENTICATED"),
        ("node/stream.mjs", 1, "UNAUTHENTICATED"),
    ],
)
def test_an_example_under_a_wrong_key_says_so_and_fails(
    shared_mesh: Mesh,
    commands: Mapping[str, Sequence[str]],
    tmp_path: Path,
    example: str,
    status: int,
    word: str,
) -> None:
    key_file = tmp_path / "key"
    key_file.write_text("wrong\n")
    done = run(commands[example], environment(shared_mesh, key_file))
    assert done.returncode == status, done.stdout + done.stderr
    assert word in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_smallest_calls_work_as_the_readme_types_them(shared_mesh: Mesh) -> None:
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    (block,) = (block for block in blocks if "grpcurl" in block)
    lines = block.splitlines()
    assert lines == ["KEY=$(cat .sluice/api-key)", *SMALLEST]
    key_file = str(shared_mesh.runtime / "api-key")
    environ = environment(shared_mesh)
    answers = []
    for line in lines[1:]:
        typed = f"{lines[0]}\n{line}"
        typed = typed.replace(".sluice/api-key", key_file)
        typed = typed.replace("localhost:8080", shared_mesh.target)
        done = run(["bash", "-euo", "pipefail", "-c", typed], environ)
        assert done.returncode == 0, done.stdout + done.stderr
        answers.append(list(documents(done.stdout)))
    is_stream(answers[0])
    ((chat,),) = answers[1:]
    assert chat["text"]
    assert chat["simulated"] is True


@pytest.mark.parametrize(
    "example",
    ["stream.py", "errors.py", "support_agent/support_agent.py", "sql_analyst/sql_analyst.py"],
)
def test_an_example_without_a_key_or_a_mesh_says_so_in_a_line(tmp_path: Path, example: str) -> None:
    """The key file is looked for where `sluice` looks: in the runtime folder."""
    base = {"PATH": os.environ["PATH"], "SLUICE_MESH_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, str(EXAMPLES / example)]
    keyless = run(command, base)
    assert keyless.returncode == 1
    (line,) = keyless.stderr.splitlines()
    assert line.startswith(f"{tmp_path / 'api-key'}: No such file")
    (tmp_path / "api-key").write_text("k\n")
    away = run(command, base | {"SLUICE_ENDPOINT": "127.0.0.1:1"})
    if example == "errors.py":  # what it is about
        assert (away.returncode, away.stdout) == (0, "code: UNAVAILABLE\n")
        return
    assert away.returncode == 1
    (line,) = away.stderr.splitlines()
    assert line.startswith("127.0.0.1:1: UNAVAILABLE: ")
