"""Values of options that are wrong are named by the option, before a mesh is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from sluice.command import cli_calls, cli_support
from sluice.command.cli import run
from sluice.command.schema_files import schema_text


@pytest.mark.parametrize(
    "text", ["", "localhost:8080", "10.0.0.1:1", "[::1]:8080", "mesh.example.com:65535"]
)
def test_an_address_is_host_and_port(text: str) -> None:
    assert cli_support._endpoint(text) == text


@pytest.mark.parametrize(
    "text", ["banana", "a:", ":80", "a:b", "a:0", "a:65536", "http://a:80", "::1:80", "a:80/x"]
)
def test_anything_else_is_no_address(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not HOST:PORT"):
        cli_support._endpoint(text)


def test_an_address_of_the_environment_is_named_by_its_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLUICE_ENDPOINT", "banana")
    assert run(["models"], {}) == 2
    said = capsys.readouterr().err
    assert "SLUICE_ENDPOINT" in said and "'banana' is not HOST:PORT" in said


def test_an_unknown_class_names_its_option() -> None:
    with pytest.raises(typer.BadParameter) as raised:
        cli_calls.class_number("urgent")
    assert raised.value.param_hint == "--class"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "--temperature", "9"], "--temperature"),
        (["agent", "run", "x", "--temperature", "-1"], "--temperature"),
        (["agent", "run", ""], "the task is empty"),
    ],
)
def test_what_the_command_knows_to_be_wrong_is_wrong_use(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(arguments, {}) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "is not UTF-8 text"),
        (b"{", "does not hold a JSON object"),
        (b"[1]", "does not hold a JSON object"),
        (b'{"type": "lamp"}', "the schema"),
    ],
)
def test_a_wrong_schema_names_its_option_and_its_file(
    tmp_path: Path, content: bytes | None, problem: str
) -> None:
    file = tmp_path / "answer.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(typer.BadParameter, match=problem) as raised:
        schema_text(file, "--answer-schema", applied=True)
    assert raised.value.param_hint == "--answer-schema"
    assert str(file) in str(raised.value)


def test_a_schema_is_sent_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "answer.json"
    file.write_text('{ "type": "object" }\n')
    assert schema_text(file, "--answer-schema", applied=True) == '{ "type": "object" }\n'
    file.write_text('{"type": "lamp"}')  # an engine's own matter
    assert schema_text(file, "--json-schema") == '{"type": "lamp"}'


def test_one_is_no_plural() -> None:
    assert [cli_support.counted(number, "chunk") for number in range(3)] == [
        "0 chunks",
        "1 chunk",
        "2 chunks",
    ]
