"""What the documents name is there: links, files, commands of make, settings.

Seen to fail on mutants: a link to a file that is not there; `adapters/gate.py` written as
`adapter/gate.py` in a README; `make benchmark` for `make bench-mesh`; a setting's default changed
without the page; the README naming an unknown variable.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.command.settings_page import PAGE, declared, render

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not {".venv", ".sluice", "node_modules"} & set(path.parts)
    and not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")
SUFFIXES = (".py", ".toml", ".md", ".yaml", ".yml", ".j2", ".proto", ".sh", ".mjs", ".in", "/")
# What is made or fetched, and so not in a fresh checkout.
MADE = (".sluice", ".venv", "bench/results", "protos/build", "node_modules")
TARGET = re.compile(r"\bmake ([a-z][a-z-]*)")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code(text: str) -> Iterator[str]:
    """What stands in code spans and code blocks."""
    blocks = text.split("\n```")
    yield from (block for block in blocks[1::2])
    for block in blocks[0::2]:
        yield from CODE.findall(block)


def files_named(text: str) -> set[str]:
    """Links inside the repository, and code spans that are paths."""
    links = {link.split("#")[0] for link in LINK.findall(text) if "://" not in link}
    spans = {
        span
        for span in CODE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))
        if "/" in span and FILE.fullmatch(span) and span.endswith(SUFFIXES)
    }
    return {name for name in links | spans if name and not name.startswith(MADE)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_file_that_a_document_names_is_there(document: Path) -> None:
    folders = [document.parent, ROOT, *ROOT.glob("*_svc")]  # `domain/`: of any service
    missing = [
        name
        for name in sorted(files_named(document.read_text()))
        if not any((folder / name).exists() for folder in folders)
    ]
    assert missing == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_make_target_that_a_document_names_is_there(document: Path) -> None:
    there = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for text in code(document.read_text()) for target in TARGET.findall(text)}
    assert named <= there


@pytest.mark.parametrize("document", DOCUMENTS, ids=relative)
def test_every_setting_that_a_document_names_is_one(document: Path) -> None:
    known = {info.variable for info in declared()}
    named = set(
        re.findall(
            r"\bSLUICE_(?:MESH|LOCAL|ENVOY|SCHEDULER|EXECUTION|INFERENCE)_[A-Z_]+\b",
            document.read_text(),
        )
    )
    assert named <= known


def test_the_page_of_settings_is_current() -> None:
    assert (ROOT / PAGE).read_text() == render(), f"run `sluice config --markdown > {PAGE}`"


def test_the_page_of_settings_has_a_line_for_every_setting() -> None:
    text = render()
    infos = list(declared())
    assert len(infos) > 80
    for info in infos:
        assert f"| `{info.name}` |" in text, info.where
        assert f"| `{info.variable}` |" in text, info.variable
