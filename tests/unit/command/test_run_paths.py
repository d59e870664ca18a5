"""Which mesh a command means: by the runtime folder, whatever became of the configuration.

Goal: a mesh that runs can be seen, stopped and called while its configuration is wrong or has
changed. Method: files in a temporary folder; this process stands in for a supervisor that lives.
Oracle: the folder, and the address in the run files.

Seen to fail on mutants: `run_paths` letting ConfigError through, `runtime_folder` without its look
at the text, `_running_endpoint` returning "" always, and not asking whether anything lives.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sluice.command import processes
from sluice.command.cli_support import open_client, run_paths
from sluice.command.run_files import Record, RunPaths, write_record
from sluice.config import ConfigError
from sluice.mesh_config import runtime_folder

ENTRY = '[[instance]]\nname = "a"\naddress = "127.0.0.1:1"\nmodel = "m"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "sluice.toml"
    path.write_text(text)
    return path


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SLUICE_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "wrong",
    [
        '[mesh]\nruntime_dir = "there"\nlog_level = "loud"\n',
        '[mesh]\nruntime_dir = "there"\nlog_level = \n',
        "[mesh]\nruntime_dir = 'there' # here\n[evnoy]\n",
        '[local]\nport_offset = -1\n[mesh]\nruntime_dir = "there"\n',
    ],
)
def test_a_wrong_file_is_a_warning_and_its_runtime_folder_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    paths = run_paths(written(tmp_path, wrong))
    assert paths.runtime == tmp_path / "there"
    said = capsys.readouterr().err
    assert said.startswith("warning: ")
    assert said.count("\n") == 1


def test_a_good_file_is_no_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_paths(written(tmp_path, ENTRY)).runtime == tmp_path / ".sluice"
    assert not capsys.readouterr().err


def test_the_environment_names_the_folder_even_without_a_file(tmp_path: Path) -> None:
    environ = {"SLUICE_MESH_RUNTIME_DIR": str(tmp_path / "x")}
    assert runtime_folder(tmp_path / "none.toml", environ) == tmp_path / "x"
    with pytest.raises(ConfigError, match=r"none\.toml"):
        runtime_folder(tmp_path / "none.toml", {})


def record(paths: RunPaths, name: str, **ports: str) -> None:
    own = processes.identify(os.getpid())
    assert own is not None
    write_record(paths.record(name), Record(name, own.pid, own.create_time, "running", ports=ports))


def dialled(config: Path) -> str:
    with open_client(config, "", None) as client:
        return client.endpoint


def test_calls_go_to_the_mesh_that_runs_and_not_to_what_the_file_says_now(tmp_path: Path) -> None:
    config = written(tmp_path, ENTRY)
    paths = RunPaths(tmp_path / ".sluice")
    record(paths, "envoy", http="127.0.0.1:9080")
    (paths.runtime / "api-key").write_text("sk-x\n")
    assert dialled(config) == "127.0.0.1:9080"
    written(tmp_path, ENTRY + "[evnoy]\n")
    assert dialled(config) == "127.0.0.1:9080"


def test_records_of_a_mesh_that_is_gone_say_nothing(tmp_path: Path) -> None:
    config = written(tmp_path, ENTRY + "[local]\nport_offset = 7\n")
    paths = RunPaths(tmp_path / ".sluice")
    gone = Record("envoy", os.getpid(), 1.0, "running", ports={"http": "127.0.0.1:9080"})
    write_record(paths.record("envoy"), gone)
    (paths.runtime / "api-key").write_text("sk-x\n")
    assert dialled(config) == "127.0.0.1:8087"
