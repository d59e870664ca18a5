"""Domains stay free of generated messages.

import-linter holds the other directions of imports (pyproject.toml). It cannot see this one,
because the folders of generated code are namespace packages, which its graph leaves out.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOMAINS = sorted(path for path in ROOT.glob("*_svc/domain") if path.is_dir())


def imports(path: Path) -> set[str]:
    """Absolute names of everything `path` imports, at any depth of the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found


def reached(start: Path) -> set[str]:
    """What `start` imports, itself and through modules of this repository."""
    names: set[str] = set()
    todo, seen = [start], {start}
    while todo:
        fresh = imports(todo.pop())
        names |= fresh
        for name in fresh:
            path = ROOT / Path(*name.split(".")).with_suffix(".py")
            if path.is_file() and path not in seen:
                seen.add(path)
                todo.append(path)
    return names


def test_there_is_a_domain_to_check() -> None:
    assert [domain.parent.name for domain in DOMAINS if domain.parent.name == "scheduler_svc"]


@pytest.mark.parametrize("domain", DOMAINS, ids=lambda path: path.parent.name)
def test_a_domain_reaches_no_generated_message(domain: Path) -> None:
    for path in sorted(domain.rglob("*.py")):
        generated = {name for name in reached(path) if "_pb2" in name or ".v1" in name}
        assert not generated, f"{path.relative_to(ROOT)} reaches {sorted(generated)}"
