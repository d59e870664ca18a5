"""The files that a mesh needs before its processes start, made once: keys, tenants, Envoy's file.

Everything here is idempotent: what is there stays. Secrets are readable by their owner only.
`envoy.yaml` and the effective configuration are derived, so they are written at every start.

`python -m sluice.command.first_files FOLDER SLUICE_TOML` does the same for containers.

Failure modes: a tenants file that does not know the key beside it is a StartError that says what to
do, since every call would be refused.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sluice.command.failures import StartError
from sluice.command.run_files import RunPaths, write_atomically
from sluice.config import ConfigError
from sluice.grants import ensure_keys
from sluice.mesh_config import read

KEY_BYTES = 24
SECRET_MODE = 0o600
TENANT = "dev"


@dataclass(frozen=True, slots=True)
class Secrets:
    """The keys of a runtime folder."""

    api_key: str
    admin_key: str


def api_key_path(runtime: Path) -> Path:
    """Where the key of the tenant `dev` is."""
    return runtime / "api-key"


def admin_key_path(runtime: Path) -> Path:
    """Where the admin key is."""
    return runtime / "admin-key"


def prepare(runtime: Path, tools: Sequence[str] | None = None) -> Secrets:
    """Makes keys, signing keys and tenants file where they are missing. The first tenant may use
    agents with the tools of these names; None: no agents. Raises StartError."""
    runtime.mkdir(parents=True, exist_ok=True)
    api_key = _ensure_secret(api_key_path(runtime), "sk-dev")
    admin_key = _ensure_secret(admin_key_path(runtime), "sk-admin")
    ensure_keys(runtime / "keys")
    _ensure_tenants(runtime / "tenants.toml", api_key, admin_key, tools)
    paths = RunPaths(runtime)
    for folder in (paths.run, paths.logs):
        folder.mkdir(exist_ok=True)
    return Secrets(api_key, admin_key)


def _ensure_secret(path: Path, prefix: str) -> str:
    try:
        key = path.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        key = ""
    if key:
        if path.stat().st_mode & 0o077:
            path.chmod(SECRET_MODE)
        return key
    key = f"{prefix}-{secrets.token_urlsafe(KEY_BYTES)}"
    write_atomically(path, key + "\n", SECRET_MODE)
    return key


def _ensure_tenants(path: Path, api_key: str, admin_key: str, tools: Sequence[str] | None) -> None:
    if not path.exists():
        text = _tenants_text(_sha256(api_key), _sha256(admin_key), tools)
        write_atomically(path, text, SECRET_MODE)
        return
    text = path.read_text(encoding="utf-8")
    for key, name in ((api_key, "api-key"), (admin_key, "admin-key")):
        if _sha256(key) not in text:
            raise StartError(
                f"{path} does not know the key in {path.with_name(name)}. Delete {path.name} to"
                f" have it made again, or put this into it: {_sha256(key)}"
            )


def _tenants_text(api_digest: str, admin_digest: str, tools: Sequence[str] | None) -> str:
    agents = "false" if tools is None else "true"
    return f"""# Who may call the mesh at first. Keys stand here as SHA-256 of their text, in hex.
# The state service takes each tenant and each key over once; then `sluice tenants` changes them.
# Admin keys stay here.
admin_key_sha256 = ["{admin_digest}"]

[[tenant]]
name = "{TENANT}"                    # [a-z0-9-], 1 to 64 characters
key_sha256 = ["{api_digest}"]
ceiling = "critical"            # highest class: critical | interactive | standard | batch
default_class = "standard"      # class of requests that say none
models = []                     # models and aliases it may use; empty: all
agents = {agents:<23}# whether it may use the agent path
tools = {json.dumps(list(tools or ()))} # tools that its agents may use, by the names of sluice.toml
sessions = true                 # whether it may keep sessions
"""


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def main(argv: list[str]) -> int:
    """Prepares the folder `argv[0]` for the configuration `argv[1]`; returns an exit status."""
    try:
        prepare(Path(argv[0]), read(Path(argv[1]), {}).tool_names)
    except (StartError, ConfigError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
