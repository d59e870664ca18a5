"""The files that `sluice docs add` puts into a collection: which they are, and what is in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer

from sluice.command.cli_support import warn_line

MEDIA_TYPES: Final = {
    ".txt": "text/plain",
    ".text": "text/plain",
    ".md": "text/markdown",
    ".markdown": "text/markdown",
    ".html": "text/html",
    ".htm": "text/html",
}
FILES_MAX: Final = 10_000
BYTES_MAX: Final = 3 << 20


class UnfitFileError(Exception):
    """A file cannot be added; the text says why."""


@dataclass(frozen=True, slots=True)
class Found:
    """A file that is to be added."""

    path: Path
    document_id: str
    media_type: str


def find_files(paths: Sequence[Path]) -> Iterator[Found]:
    """The files under these paths in order, with the names that they get. A folder's files that
    have another suffix are passed over with a warning; one that was named itself is refused, and so
    are two of the same name, of which one would replace the other. Raises BadParameter."""
    named: dict[str, Path] = {}
    for path in paths:
        if not path.exists():
            raise typer.BadParameter(f"there is no {path}")
        files = sorted(one for one in path.rglob("*") if one.is_file()) if path.is_dir() else [path]
        for file in files:
            hidden = file != path and any(
                part.startswith(".") for part in file.relative_to(path).parts
            )
            kind = MEDIA_TYPES.get(file.suffix.lower())
            if hidden or kind is None:
                if file == path:
                    raise typer.BadParameter(
                        f"{file} is not text, Markdown or HTML: suffixes are"
                        f" {', '.join(MEDIA_TYPES)}"
                    )
                if not hidden:
                    warn_line(f"{file} is passed over: its suffix says no known kind of text")
                continue
            name = file.relative_to(path).as_posix() if file != path else file.name
            if name.encode(errors="ignore").decode() != name:
                raise typer.BadParameter(f"the name {name!a} is not UTF-8")
            if name in named:
                raise typer.BadParameter(f"{named[name]} and {file} would both be {name!r}")
            named[name] = file
            if len(named) > FILES_MAX:
                raise typer.BadParameter(f"there are more than {FILES_MAX} files")
            yield Found(file, name, kind)


def content_of(file: Found) -> bytes:
    """What a file holds: UTF-8 text. Raises UnfitFileError and OSError."""
    content = file.path.read_bytes()
    if not content:
        raise UnfitFileError("the file is empty")
    if len(content) > BYTES_MAX:
        raise UnfitFileError(f"{len(content)} bytes; at most {BYTES_MAX}")
    try:
        content.decode()
    except UnicodeDecodeError:
        raise UnfitFileError(f"{file.path} is not UTF-8 text") from None
    return content
