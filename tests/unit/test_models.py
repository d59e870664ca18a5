"""Preparing a model: complete or absent, found damaged, made again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sluice import models
from sluice.models import BUILDING_PREFIX, STALE_PREFIX, Model, ModelError, Progress, check, prepare

# Stands in for the package that carries the weights: installed wherever these tests run.
PACKAGE, MODULE = "pytest", "pytest"
WEIGHTS = b"weights"


@dataclass
class Builder:
    """Writes two small files, or does what `instead` says halfway through."""

    built: int = 0
    instead: Callable[[], None] | None = None
    seen: list[Path] = field(default_factory=list)

    def __call__(self, package: Path, target: Path, progress: Progress) -> None:
        assert package.is_dir()
        progress("writing")
        (target / "config.json").write_text("{}", encoding="utf-8")
        if self.instead:
            self.instead()
        (target / "pooling").mkdir()
        (target / "pooling" / "model.safetensors").write_bytes(WEIGHTS)
        self.built += 1
        self.seen.append(target)


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def tiny(builder: Builder) -> tuple[Model, ...]:
    return (Model("tiny", PACKAGE, MODULE, builder),)


def leftovers(root: Path) -> list[str]:
    return [path.name for path in root.iterdir() if path.name not in {"tiny", models.LOCK_NAME}]


def test_a_prepared_model_is_intact_and_is_not_built_again(
    tmp_path: Path, builder: Builder, tiny: tuple[Model, ...]
) -> None:
    prepare(tmp_path, tiny)
    assert check(tmp_path, tiny) == []
    prepare(tmp_path, tiny)
    assert builder.built == 1
    assert leftovers(tmp_path) == []


def test_a_model_is_built_beside_its_name_and_appears_by_one_rename(
    tmp_path: Path, builder: Builder, tiny: tuple[Model, ...]
) -> None:
    builder.instead = lambda: absent.append(not (tmp_path / "tiny").exists())
    absent: list[bool] = []
    prepare(tmp_path, tiny)
    assert absent == [True]
    assert builder.seen[0].parent == tmp_path, "another file system would make the rename a copy"


def truncate(path: Path) -> None:
    path.write_bytes(WEIGHTS[:-1])


def flip_a_byte(path: Path) -> None:
    path.write_bytes(b"W" + WEIGHTS[1:])


def add_a_file(path: Path) -> None:
    path.with_name("extra.bin").touch()


def damage_the_manifest(path: Path) -> None:
    (path.parent.parent / models.MANIFEST).write_text("{", encoding="utf-8")


def empty_the_manifest(path: Path) -> None:
    (path.parent.parent / models.MANIFEST).write_text("[]", encoding="utf-8")


@pytest.mark.parametrize(
    "damage",
    [truncate, flip_a_byte, Path.unlink, add_a_file, damage_the_manifest, empty_the_manifest],
)
def test_a_damaged_model_is_found_and_made_again(
    tmp_path: Path,
    builder: Builder,
    tiny: tuple[Model, ...],
    damage: Callable[[Path], None],
) -> None:
    prepare(tmp_path, tiny)
    damage(tmp_path / "tiny" / "pooling" / "model.safetensors")
    assert len(check(tmp_path, tiny)) == 1
    prepare(tmp_path, tiny)
    assert builder.built == 2
    assert check(tmp_path, tiny) == []
    assert leftovers(tmp_path) == []


def test_a_model_of_an_older_recipe_is_made_again(
    tmp_path: Path,
    builder: Builder,
    tiny: tuple[Model, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prepare(tmp_path, tiny)
    monkeypatch.setattr(models, "RECIPE", models.RECIPE + 1)
    prepare(tmp_path, tiny)
    assert builder.built == 2


@pytest.mark.parametrize("reason", [KeyboardInterrupt, SystemExit, ModelError, OSError])
def test_an_interrupted_build_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, builder: Builder, tiny: tuple[Model, ...], reason: type[BaseException]
) -> None:
    def stop() -> None:
        raise reason

    builder.instead = stop
    with pytest.raises(reason):
        prepare(tmp_path, tiny)
    assert not (tmp_path / "tiny").exists()
    assert leftovers(tmp_path) == []
    builder.instead = None
    prepare(tmp_path, tiny)
    assert check(tmp_path, tiny) == []


def test_what_a_killed_run_left_is_removed(tmp_path: Path, tiny: tuple[Model, ...]) -> None:
    for prefix in (BUILDING_PREFIX, STALE_PREFIX):
        (tmp_path / f"{prefix}tiny").mkdir()
        (tmp_path / f"{prefix}tiny" / "half").touch()
    prepare(tmp_path, tiny)
    assert leftovers(tmp_path) == []
    assert check(tmp_path, tiny) == []


def test_a_failed_rebuild_keeps_the_files_that_were_there(
    tmp_path: Path, builder: Builder, tiny: tuple[Model, ...]
) -> None:
    prepare(tmp_path, tiny)
    add_a_file(tmp_path / "tiny" / "pooling" / "model.safetensors")

    def stop() -> None:
        raise ModelError("no")

    builder.instead = stop
    with pytest.raises(ModelError):
        prepare(tmp_path, tiny)
    assert (tmp_path / "tiny" / "pooling" / "model.safetensors").read_bytes() == WEIGHTS


def test_a_missing_package_says_what_to_run(tmp_path: Path, builder: Builder) -> None:
    absent = (Model("tiny", "no-such-package", "no_such_package", builder),)
    with pytest.raises(ModelError, match="make env"):
        prepare(tmp_path, absent)


def test_too_little_disk_is_said_before_anything_is_written(
    tmp_path: Path,
    builder: Builder,
    tiny: tuple[Model, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "DISK_BYTES_NEEDED", 1 << 60)
    with pytest.raises(ModelError, match="MB free"):
        prepare(tmp_path, tiny)
    assert builder.built == 0
    assert leftovers(tmp_path) == []
