"""Settings: where values come from and what is refused.

Goal: a bad configuration is refused at start, naming the field; a reload of garbage keeps the
last good values and counts. Method: every field of every registered section, out of range in both
directions, of every wrong type, in the file and in the environment; Hypothesis for the reload.
Oracle: ConfigError with the field's name, its range and its unit. Mutants seen to fail: ``le`` is
not checked; booleans pass for integers; unknown keys are ignored; a failed reload replaces the
values.
"""

from __future__ import annotations

import enum
import importlib
import math
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.config import (
    SECTIONS,
    ConfigError,
    Reloadable,
    SettingInfo,
    all_settings,
    describe,
    load,
    section,
    setting,
)

# Modules that register sections; importing them fills SECTIONS.
_ROOT = Path(__file__).resolve().parents[3]
for _module in (
    "sluice.mesh_config",
    "sluice.edge_config",
    *sorted(f"{path.parent.name}.config" for path in _ROOT.glob("*_svc/config.py")),
):
    importlib.import_module(_module)


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@section("test-sample")
@dataclass(frozen=True, slots=True)
class Sample:
    """One field of each type."""

    count: int = setting(5, unit="items", ge=1, le=10, help="How many.")
    share: float = setting(0.5, ge=0.0, le=1.0)
    wait_s: float = setting(1.0, unit="s", ge=0.0)
    on: bool = setting(True)
    name: str = setting("a", choices=("a", "b"))
    folder: Path = setting(Path("x"))
    hosts: tuple[str, ...] = setting((), le=3)
    colour: Colour = setting(Colour.RED)
    maybe: int | None = setting(None, ge=1)
    key: str = setting("", secret=True)


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "sluice.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_the_environment_goes_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    path = _file(
        tmp_path, '["test-sample"]\ncount = 7\nshare = 1\nhosts = ["a", "b"]\n[other]\nx = 1'
    )
    environ = {"SLUICE_TEST_SAMPLE_COUNT": "9", "SLUICE_OTHER_X": "1", "PATH": "/bin"}
    sample = load(Sample, "test-sample", path=path, environ=environ)
    assert (sample.count, sample.share, sample.wait_s) == (9, 1.0, 1.0)
    assert sample.hosts == ("a", "b")


def test_every_type_can_come_from_the_environment() -> None:
    prefix = "SLUICE_TEST_SAMPLE_"
    environ = {
        f"{prefix}COUNT": "3",
        f"{prefix}SHARE": "0.25",
        f"{prefix}ON": "no",
        f"{prefix}NAME": "b",
        f"{prefix}FOLDER": "/tmp/y",
        f"{prefix}HOSTS": "h1:1, h2:2,",
        f"{prefix}COLOUR": "blue",
        f"{prefix}MAYBE": "4",
    }
    sample = load(Sample, "test-sample", environ=environ)
    assert sample == Sample(
        count=3,
        share=0.25,
        on=False,
        name="b",
        folder=Path("/tmp/y"),
        hosts=("h1:1", "h2:2"),
        colour=Colour.BLUE,
        maybe=4,
    )
    assert load(Sample, "test-sample", environ={f"{prefix}MAYBE": ""}).maybe is None


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("count = 0", ("test-sample.count", "0", "1 to 10 items")),
        ("count = 11", ("test-sample.count", "11", "1 to 10 items")),
        ("count = true", ("test-sample.count", "integer")),
        ("count = 1.0", ("test-sample.count", "integer")),
        ('count = "5"', ("test-sample.count", "integer")),
        ("share = 1.01", ("test-sample.share", "0 to 1")),
        ("share = nan", ("test-sample.share", "finite")),
        ("wait_s = inf", ("test-sample.wait_s", "finite")),
        ("wait_s = -0.1", ("test-sample.wait_s", "at least 0 s")),
        ("on = 1", ("test-sample.on", "boolean")),
        ('name = "c"', ("test-sample.name", "one of a, b")),
        ("folder = 1", ("test-sample.folder", "path")),
        ("hosts = [1]", ("test-sample.hosts", "list of strings")),
        ('hosts = ["a", "b", "c", "d"]', ("test-sample.hosts", "at most 3")),
        ('colour = "green"', ("test-sample.colour", "one of red, blue")),
        ("maybe = 0", ("test-sample.maybe", "at least 1")),
        ("typo = 1", ("test-sample.typo", "no such setting")),
    ],
)
def test_a_bad_value_is_refused_by_name(line: str, words: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Sample, "test-sample", path=_file(tmp_path, f"['test-sample']\n{line}"), environ={})
    for word in words:
        assert word in str(caught.value)


def test_a_secret_never_appears_in_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Sample, "test-sample", path=_file(tmp_path, "['test-sample']\nkey = 4711"), environ={})
    assert "4711" not in str(caught.value)
    assert "test-sample.key" in str(caught.value)


def test_an_unknown_variable_of_the_section_is_refused() -> None:
    with pytest.raises(ConfigError, match="SLUICE_TEST_SAMPLE_CUONT"):
        load(Sample, "test-sample", environ={"SLUICE_TEST_SAMPLE_CUONT": "1"})


def test_a_file_that_is_missing_or_no_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml"):
        load(Sample, "test-sample", path=tmp_path / "absent.toml", environ={})
    with pytest.raises(ConfigError, match="not TOML"):
        load(Sample, "test-sample", path=_file(tmp_path, "= ="), environ={})
    with pytest.raises(ConfigError, match="must be a table"):
        load(Sample, "test-sample", path=_file(tmp_path, "test-sample = 1"), environ={})


def test_a_subsection_is_left_to_whoever_loads_it(tmp_path: Path) -> None:
    path = _file(tmp_path, "[test-sample]\ncount = 2\n[test-sample.more]\nshare = 0.1")
    environ = {"SLUICE_TEST_SAMPLE_MORE_COUNT": "4"}
    outer = load(Sample, "test-sample", path=path, environ=environ, subsections=("more",))
    inner = load(Sample, "test-sample.more", path=path, environ=environ)
    assert (outer.count, inner.count, inner.share) == (2, 4, 0.1)
    with pytest.raises(ConfigError, match=r"test-sample\.more"):
        load(Sample, "test-sample", path=path, environ={})


def _out_of_range(info: SettingInfo) -> list[str]:
    """Values, as an environment writes them, that the setting must refuse."""
    bad: list[str] = []
    number = "number" in info.kind or "integer" in info.kind
    if "list" in info.kind:
        count_max = info.le
        if count_max is not None:
            bad.append(",".join("x" * (int(count_max) + 1)))
        if info.ge is not None and info.ge >= 1:
            bad.append("")
    elif number:
        bad += ["nan", "inf", "x", "1;2"]
        if "optional" not in info.kind:
            bad.append("")
        if info.ge is not None:
            bad.append(str(math.ceil(info.ge) - 1))
        if info.le is not None:
            bad.append(str(math.floor(info.le) + 1))
    if info.choices:
        bad.append("not-a-choice")
    if "boolean" in info.kind:
        bad += ["maybe", "", "2"]
    return bad


def test_every_setting_of_every_section_refuses_what_is_out_of_range() -> None:
    refused = 0
    for info in all_settings():
        for text in _out_of_range(info):
            with pytest.raises(ConfigError) as caught:
                load(SECTIONS[info.section], info.section, environ={info.variable: text})
            assert caught.value.where == info.where, f"{info.where} took {text!r}"
            refused += 1
    assert refused > 50


def test_every_section_loads_from_nothing_but_its_defaults() -> None:
    for name, cls in SECTIONS.items():
        assert isinstance(load(cls, name, environ={}), cls)


def test_every_setting_says_what_it_is_for() -> None:
    missing = [
        info.where
        for info in all_settings()
        if not info.help and not info.section.startswith("test-")
    ]
    assert missing == []


def test_every_number_has_a_range() -> None:
    unbounded = [
        info.where
        for info in all_settings()
        if info.kind in ("integer", "number")
        and (info.ge is None or info.le is None)
        and not info.section.startswith("test-")
    ]
    assert unbounded == []


def test_a_description_holds_what_documentation_needs() -> None:
    info = describe(Sample, "test-sample")[0]
    assert (info.where, info.kind, info.default_text) == ("test-sample.count", "integer", "5")
    assert (info.range, info.unit, info.help) == ("1 to 10 items", "items", "How many.")
    assert info.variable == "SLUICE_TEST_SAMPLE_COUNT"


def test_a_check_across_fields_is_a_config_error() -> None:
    @dataclass(frozen=True, slots=True)
    class Pair:
        low: int = setting(1)
        high: int = setting(2)

        def __post_init__(self) -> None:
            if self.low > self.high:
                raise ValueError("low must not be above high")

    with pytest.raises(ConfigError, match=r"test-pair: low must not be above high"):
        load(Pair, "test-pair", environ={"SLUICE_TEST_PAIR_LOW": "3"})


@given(garbage=st.binary(max_size=60))
def test_a_reload_of_garbage_keeps_the_last_good_values(
    garbage: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("reload") / "sluice.toml"
    path.write_text("[test-sample]\ncount = 7", encoding="utf-8")
    values = Reloadable(lambda: load(Sample, "test-sample", path=path, environ={}))
    good = values.current
    path.write_bytes(garbage + b"\n[test-sample]\ncount = 99\n")
    assert not values.reload()
    assert values.current is good
    assert (values.reloads, values.failures) == (0, 1)
    assert values.last_error is not None
    path.write_text("[test-sample]\ncount = 8", encoding="utf-8")
    assert values.reload()
    assert values.current.count == 8
    assert (values.reloads, values.failures) == (1, 1)
    assert values.last_error is None


def test_a_first_load_that_fails_refuses_the_start(tmp_path: Path) -> None:
    path = _file(tmp_path, "[test-sample]\ncount = 99")
    with pytest.raises(ConfigError, match=r"test-sample\.count"):
        Reloadable(lambda: load(Sample, "test-sample", path=path, environ={}))
