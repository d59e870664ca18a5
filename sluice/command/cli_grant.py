"""`sluice grant`: a dispatch grant, to call an instance past the scheduler while debugging.

The call that it prints can be typed as it is: with the paths that this shell needs, at the address
of the instance that the grant is for.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from sluice.command.cli_support import ConfigOption, config_file, errors, run_paths
from sluice.command.run_files import RunPaths, read_plan
from sluice.config import ConfigError

TTL_S: Final = 300.0
TTL_MAX_S: Final = 3_600.0
ANY: Final = "*"
SERVICE: Final = "sluice.inference.v1.InferenceService"
_INFERENCE_MODULE: Final = "inference_svc.main"
_PYTHON: Final = """\
import base64, os, grpc
from sluice.common.v1 import grant_pb2, input_pb2
from sluice.inference.v1 import inference_pb2, inference_pb2_grpc
grant = grant_pb2.SignedGrant.FromString(base64.b64decode(os.environ["GRANT"]))
stub = inference_pb2_grpc.InferenceServiceStub(grpc.insecure_channel("{address}"))
inputs = [input_pb2.Input(text="Hello")]
{call}
"""
_GENERATE: Final = """\
work = inference_pb2.Work(request_id="{request_id}", input=inputs[0])
for message in stub.Generate(inference_pb2.GenerateRequest(work=work, grant=grant)):
    print(message)"""
_EMBED: Final = """\
request = inference_pb2.EmbedRequest(request_id="{request_id}", inputs=inputs, grant=grant)
print(stub.Embed(request))"""


@dataclass(frozen=True, slots=True)
class Target:
    """An instance that a grant may be for."""

    name: str
    address: str
    embeds: bool


def add_grant(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(grant)


def grant(
    instance: Annotated[str, typer.Option(help="The instance that may run it; * is any.")] = ANY,
    request_id: Annotated[str, typer.Option(help="The request that may run; * is any.")] = ANY,
    ttl: Annotated[
        float,
        typer.Option(
            help="How long it is valid, in s. Clocks may differ by 5 s: it is taken for as much"
            " longer.",
            min=1.0,
            max=TTL_MAX_S,
        ),
    ] = TTL_S,
    form: Annotated[
        str, typer.Option("--format", help="json or base64 (of the message).")
    ] = "json",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Without an example.")] = False,
    config: ConfigOption = None,
) -> None:
    """Mint a dispatch grant, to call an inference service past the scheduler while debugging."""
    from google.protobuf import json_format

    from sluice.grants import GrantSigner

    if form not in ("json", "base64"):
        raise typer.BadParameter(f"{form!r} is not json or base64", param_hint="--format")
    paths = run_paths(config)
    target = _target(_targets(paths, config), instance)
    try:
        signer = GrantSigner.load(paths.runtime / "keys", issuer="sluice-grant")
    except (OSError, ValueError):
        raise typer.BadParameter(
            f"there is no signing key in {paths.runtime / 'keys'}: `sluice up` makes one"
        ) from None
    signed = signer.sign(request_id, instance, now_unix_s=time.time(), ttl_s=ttl)
    if form == "base64":
        typer.echo(base64.b64encode(signed.SerializeToString()).decode())
    else:
        typer.echo(json.dumps(json_format.MessageToDict(signed)))
    if not quiet:
        own = [] if instance == ANY else ["--instance", instance]
        own += [] if request_id == ANY else ["--request-id", request_id]
        own += ["--config", str(config)] if config is not None else []
        run_as = "debug" if request_id == ANY else request_id
        errors().print(
            Text(f"Valid for {ttl:.0f} s. For example:\n\n{_example(target, form, own, run_as)}"),
            soft_wrap=True,
        )


def _targets(paths: RunPaths, config: Path | None) -> list[Target]:
    """The instances of the mesh that was started last, else those of the configuration."""
    from sluice.command.preflight import find_device

    embedding: set[str] = set()
    configured: list[Target] = []
    try:
        file = config_file(config)
        for one in file.instances(find_device(file.local.device)):
            embedding |= {one.name} if one.embeds else set()
            configured.append(Target(one.name, str(one.address), one.embeds))
    except ConfigError:
        pass  # `run_paths` has said so
    plan = read_plan(paths.plan)
    if plan is None:
        return configured
    return [
        Target(one.name, one.ports["api"], one.name in embedding)
        for one in plan.services
        if _INFERENCE_MODULE in one.command
    ]


def _target(targets: list[Target], instance: str) -> Target:
    """The instance of that name; of any, the first that generates."""
    known = ", ".join(one.name for one in targets) or "none"
    for one in sorted(targets, key=lambda target: target.embeds):
        if instance in (ANY, one.name):
            return one
    raise typer.BadParameter(
        f"there is no instance {instance!r}; there are: {known}", param_hint="--instance"
    )


def _example(target: Target, form: str, own: list[str], request_id: str) -> str:
    from sluice.command.up_screen import short_path, tool_path

    mint = shlex.join([tool_path("sluice"), "grant", "-q", *own])
    if form == "base64":
        python = shlex.quote(short_path(Path(sys.executable)))
        call = (_EMBED if target.embeds else _GENERATE).format(request_id=request_id)
        code = _PYTHON.format(address=target.address, call=call)
        return f"GRANT=$({mint} --format base64) {python} - <<'PYTHON'\n{code}PYTHON"
    signed = "@GRANT@"
    method, body = "Embed", dict[str, object](requestId=request_id, inputs=[{"text": "Hello"}])
    if not target.embeds:
        work = {"requestId": request_id, "input": {"text": "Hello"}}
        method, body = "Generate", {"work": work}
    text = json.dumps({**body, "grant": signed}, separators=(",", ":"))
    # In double quotes, since the shell puts the grant in.
    quoted = re.sub(r'([\\"$`])', r"\\\1", text).replace(f'\\"{signed}\\"', f"$({mint})")
    grpcurl = shlex.quote(tool_path("grpcurl"))
    return f'{grpcurl} -plaintext -d "{quoted}" {target.address} {SERVICE}/{method}'
