"""Every reason for which a client can be refused: its codes, its scope, and what it means.

The one list behind ``docs/ERRORS.md`` (``python -m sluice.reasons`` prints the page) and behind the
metadata ``scope`` and ``charged`` that every error carries. Values only. A test finds the reasons
that the code raises and asks for each here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from sluice.errors import Code, SluiceError

PAGE: Final = "docs/ERRORS.md"

HTTP_STATUS: Final[Mapping[Code, int]] = {
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.UNIMPLEMENTED: 501,
    Code.INTERNAL: 500,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}
"""As Envoy's transcoder translates codes."""


@dataclass(frozen=True, slots=True)
class Reason:
    """``codes``: the codes that it comes with. ``scope``: what it is about. ``delay``: whether it
    says when to ask again (RetryInfo, ``retry-after``)."""

    codes: tuple[Code, ...]
    scope: str
    text: str
    delay: bool = False


def _reason(code: Code, scope: str, text: str, *, delay: bool = False) -> Reason:
    return Reason((code,), scope, text, delay)


_BAD, _NONE = Code.INVALID_ARGUMENT, Code.NOT_FOUND
_BUSY, _DOWN = Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE
_LATE, _NOT_NOW = Code.DEADLINE_EXCEEDED, Code.FAILED_PRECONDITION
_WHO, _MAY_NOT = Code.UNAUTHENTICATED, Code.PERMISSION_DENIED

REQUESTS: Final[Mapping[str, Reason]] = {
    # Who asks.
    "KEY_MISSING": _reason(_WHO, "key", "No key was sent."),
    "KEY_MALFORMED": _reason(_WHO, "key", "The header is not `Bearer KEY`."),
    "KEY_UNKNOWN": Reason((_WHO, _NONE), "key", "No such key."),
    "KEY_EXPIRED": _reason(_WHO, "key", "The key has run out."),
    # Who asks for a step of a run (agent services; no client hears these).
    "CREDENTIAL_MISSING": _reason(_WHO, "run", "The call carries no run credential."),
    "CREDENTIAL_UNKNOWN_KEY": _reason(_WHO, "run", "No scheduler that is known here signed it."),
    "CREDENTIAL_SIGNATURE": _reason(_WHO, "run", "Its signature is wrong, or it cannot be read."),
    "CREDENTIAL_EXPIRED": _reason(_WHO, "run", "It is not valid at this time."),
    "RUN_ENDED": _reason(_NOT_NOW, "run", "The run has ended."),
    "RUN_NOT_PERMITTED": _reason(
        _MAY_NOT, "run", "The run's tenant is gone, or may not have such runs any more."
    ),
    # What is asked.
    "INVALID_FIELD": _reason(_BAD, "request", "A field is wrong; BadRequest names it."),
    "MESSAGE_TOO_LARGE": _reason(_BAD, "request", "The message exceeds the limit of all hops."),
    "MESSAGE_UNREADABLE": _reason(_BAD, "request", "The message cannot be decoded."),
    "CONTEXT_LENGTH_EXCEEDED": _reason(
        _BAD, "request", "Prompt and output do not fit into the model's context."
    ),
    "TOTAL_TOKENS": _reason(
        _BAD, "request", "`total_tokens_max` does not hold the prompt and an output."
    ),
    "CONTEXT_LENGTH": _reason(_BAD, "request", "As CONTEXT_LENGTH_EXCEEDED, for embeddings."),
    "INVALID_CONSTRAINT": _reason(
        _BAD, "request", "The structured output does not compile, or not in time."
    ),
    "NO_CHAT_TEMPLATE": _reason(_NOT_NOW, "model", "The model takes no conversations: send text."),
    "MODEL_UNKNOWN": _reason(_NONE, "model", "No such model for this tenant."),
    "MODEL_CAPABILITY": _reason(_NOT_NOW, "model", "The model does not do what is asked."),
    "METHOD_NOT_AVAILABLE": _reason(Code.UNIMPLEMENTED, "request", "The method is not there."),
    # The agent path.
    "AGENT_REFUSED": Reason(
        (_MAY_NOT, _BUSY),
        "tenant",
        "The agent path is closed; `gate_reason` says why: NOT_ALLOWED (an operator opens it by"
        " `sluice tenants set TENANT --agents`), TOO_MANY_RUNS, SATURATED.",
    ),
    "AGENT_SERVICE_MISSING": _reason(_DOWN, "mesh", "This mesh has no agent service."),
    "AGENT_UNREACHABLE": _reason(_DOWN, "mesh", "No agent service answers now.", delay=True),
    "SESSIONS_NOT_ALLOWED": _reason(_MAY_NOT, "tenant", "The tenant may not keep sessions."),
    "TOOL_NOT_ALLOWED": _reason(
        _MAY_NOT,
        "tenant",
        "A tool is not in the tenant's list; `tool` names it. An operator adds it by"
        " `sluice tenants set TENANT --add-tool TOOL`.",
    ),
    # Quotas; QuotaFailure names the one that is used up.
    "QUOTA_EXCEEDED": _reason(_BUSY, "tenant", "A quota of the tenant is used up.", delay=True),
    "QUOTA_TOO_SMALL": _reason(
        _BUSY, "tenant", "The request needs more than the whole quota; waiting does not help."
    ),
    "QUOTA_QUEUE_FULL": _reason(
        _BUSY, "tenant", "Too many requests of the tenant wait for quota.", delay=True
    ),
    "QUOTA_UNREACHABLE": _reason(
        _DOWN, "tenant", "Quotas cannot be checked, and the tenant's policy is closed.", delay=True
    ),
    "GRANT_LAPSED": _reason(
        _DOWN, "scheduler", "The scheduler could not start it in time.", delay=True
    ),
    # Queue and room.
    "QUEUE_FULL": _reason(
        _BUSY, "class", "Too many requests wait; scope says whose bound: class, tenant.", delay=True
    ),
    "HOPELESS": _reason(
        _BUSY, "class", "The first token could not come within its limit.", delay=True
    ),
    "TOO_MANY_STREAMS": _reason(
        _BUSY, "scheduler", "As many streams are open as can be written to in time.", delay=True
    ),
    "NO_INSTANCE": _reason(_DOWN, "model", "No instance serves the model now.", delay=True),
    "DRAINING": _reason(_DOWN, "scheduler", "The scheduler is going down.", delay=True),
    # After it was taken.
    "INSTANCE_LOST": _reason(
        _DOWN,
        "instance",
        "Instances failed it; `delivered_tokens` had reached the client, `cause` says how.",
    ),
    "INSTANCE_PROTOCOL": _reason(
        Code.INTERNAL, "instance", "An instance sent what makes no sense."
    ),
    "POISON": _reason(
        _NOT_NOW, "request", "Engines died each time they ran this input: it is not run for now."
    ),
    "EXECUTION_UNREACHABLE": _reason(_DOWN, "mesh", "No execution service is reachable."),
    "DEADLINE_EXCEEDED": _reason(_LATE, "request", "The deadline of the request passed."),
    "DEADLINE_TOO_CLOSE": _reason(_LATE, "request", "Less time is left than the work needs."),
    "FIRST_TOKEN_TIMEOUT": _reason(_LATE, "request", "No first token came within its limit."),
    "INTER_TOKEN_TIMEOUT": _reason(_LATE, "request", "No further token came within the limit."),
    "SLOW_CONSUMER": _reason(_BUSY, "request", "The client did not read its answer."),
    "WATCH_BYTES": _reason(
        _BUSY,
        "tenant",
        "Clients of the tenant leave too much of watched runs unread; `limit` names the bound.",
        delay=True,
    ),
    "OUTPUT_TOO_LARGE": _reason(_BUSY, "request", "The answer does not fit: use the stream."),
    "CANCELLED": _reason(Code.CANCELLED, "request", "The client went away."),
    "CALL_CANCELLED": _reason(_DOWN, "scheduler", "The server ended the call."),
    "INTERNAL": _reason(
        Code.INTERNAL, "mesh", "A fault of the mesh; its log holds more under the request id."
    ),
    # What says no reason of ours: a proxy, a connection, a library.
    "PEER_UNAVAILABLE": _reason(
        _DOWN, "mesh", "A service of the mesh, or one before it, does not answer now: ask again."
    ),
    "PEER_RESOURCE_EXHAUSTED": _reason(
        _BUSY, "request", "The message exceeds what a service on its way takes, or that is full."
    ),
    "PEER_CANCELLED": _reason(
        Code.CANCELLED, "request", "The call was ended on its way: ask again."
    ),
    # Records and usage.
    "DECISION_UNKNOWN": _reason(_NONE, "request", "No decision record of such a request is kept."),
    "DECISIONS_UNREACHABLE": _reason(
        _DOWN, "mesh", "Decision records cannot be read now.", delay=True
    ),
    "CLOCKS_DIFFER": _reason(
        _DOWN,
        "mesh",
        "An instance's clock is ahead, so that it starts no counted work.",
        delay=True,
    ),
    # Values, blobs, documents and tools.
    "VALUE_UNKNOWN": _reason(_NONE, "request", "No such value."),
    "BLOB_UNKNOWN": _reason(_NONE, "request", "No such large result, or its time has passed."),
    "DOCUMENT_UNKNOWN": _reason(_NONE, "request", "No such document."),
    "COLLECTION_UNKNOWN": _reason(
        _NONE, "request", "No such collection of documents: nothing is in it."
    ),
    "STORAGE_FULL": _reason(
        _NOT_NOW, "tenant", "The tenant has stored as much as it may; `limit` names the bound."
    ),
    "CHUNKS_MISSING": _reason(
        _NOT_NOW, "request", "A document was to be complete, but chunks of it are missing."
    ),
    "INDEX_LOADING": _reason(
        _DOWN, "tenant", "The collection is being read for searches.", delay=True
    ),
    "INDEX_TOO_LARGE": _reason(
        _NOT_NOW, "tenant", "The collection is larger than the memory for searches."
    ),
    "SEARCH_BUSY": _reason(_BUSY, "mesh", "Too many searches are running.", delay=True),
    "NO_STATE_SERVICE": _reason(_NOT_NOW, "mesh", "This mesh keeps no usage."),
}

ADMIN: Final[Mapping[str, Reason]] = {
    "ADMIN_ONLY": _reason(_MAY_NOT, "key", "This needs an admin key."),
    "STATE_NOT_CONFIGURED": _reason(_NOT_NOW, "mesh", "This needs a state service."),
    "STATE_UNREACHABLE": _reason(
        _DOWN,
        "mesh",
        "The state service does not answer. To a request: it has not told its keys since this"
        " scheduler started, and the key is none of the tenants file's. To a run's model call: this"
        " scheduler does not know the run's tenant yet.",
        delay=True,
    ),
    "STORE_UNAVAILABLE": _reason(_DOWN, "mesh", "The store does not answer."),
    "STORE_FULL": _reason(
        _BUSY, "mesh", "The store's memory is full: it keeps nothing new for now.", delay=True
    ),
    "TENANT_UNKNOWN": _reason(_NONE, "tenant", "No such tenant."),
    "TENANT_BEING_DELETED": _reason(
        _NOT_NOW, "tenant", "What a deleted tenant of the name left is not gone yet.", delay=True
    ),
    "ALIAS_UNKNOWN": _reason(_NONE, "model", "No such alias."),
    "INSTANCE_UNKNOWN": _reason(_NONE, "instance", "No such instance."),
    "TOOL_FIELD_NOT_ALLOWED": _reason(
        _BAD, "tool", "A field that only tools of the configuration may have; it is named."
    ),
    "ALREADY_EXISTS": _reason(Code.ALREADY_EXISTS, "request", "It exists already."),
    "REGISTRY_FULL": _reason(_NOT_NOW, "mesh", "There are as many as there may be."),
    "VERSION_CONFLICT": _reason(Code.ABORTED, "request", "Somebody else changed it meanwhile."),
    "NOTHING_EARLIER": _reason(_NOT_NOW, "model", "There is nothing to roll back to."),
    "ALIAS_CONFIGURED": _reason(
        _NOT_NOW, "model", "The alias is in the configuration only, and only that can remove it."
    ),
}

RUNS: Final[Mapping[str, Reason]] = {
    "BUDGET_STEPS": _reason(_BUSY, "run", "As many model and tool calls as the run may make."),
    "BUDGET_TOKENS": _reason(_BUSY, "run", "The run's model tokens do not hold another call."),
    "BUDGET_TOOL_CALLS": _reason(_BUSY, "run", "More tool calls than the run may make."),
    "BUDGET_COST": _reason(_BUSY, "run", "The run has cost what it may."),
    "BUDGET_WALL_TIME": _reason(
        _LATE, "run", "The run's time is over; waiting for people is not counted."
    ),
    "REPEATED_CALLS": _reason(
        _NOT_NOW, "run", "The model asks again and again for a call that gives the same result."
    ),
    "WRONG_CALLS": _reason(
        _NOT_NOW, "run", "The model wrote what cannot be used, several times in a row."
    ),
    "RUN_CANCELLED": _reason(Code.CANCELLED, "run", "Somebody cancelled the run."),
    "CALL_ABANDONED": _reason(
        Code.CANCELLED,
        "call",
        "The run ended before the tool call did; it may have had its effect.",
    ),
    "CALL_SKIPPED": _reason(Code.CANCELLED, "call", "A person went on without the tool call."),
    "TOOL_UNKNOWN": _reason(_NONE, "call", "No such tool, registered or for this run."),
    "TOOL_NOT_GRANTED": _reason(_MAY_NOT, "call", "The run may not call it."),
    "TOOL_NOT_APPROVED": _reason(_MAY_NOT, "call", "Its calls need a person's approval."),
    "TOOL_REFUSED": _reason(_BAD, "call", "It does not take these arguments; nothing was done."),
    "TOOL_UNAVAILABLE": _reason(
        _DOWN, "call", "It cannot be called now: not reached, at rest after faults, no secret."
    ),
    "TOOL_TIMEOUT": _reason(_LATE, "call", "It took longer than its timeout or the run has."),
    "TOOL_LOST": _reason(_DOWN, "call", "Nobody knows whether it had its effect."),
    "TOOL_FAILED": _reason(Code.ABORTED, "call", "It says itself that it failed."),
    "TOOL_OUTPUT_TOO_LARGE": _reason(
        Code.ABORTED, "call", "It was called; its result exceeds its limit."
    ),
    "TOOL_OUTPUT_INVALID": _reason(
        Code.ABORTED, "call", "It was called; its result cannot be read."
    ),
    "EGRESS_REFUSED": _reason(_MAY_NOT, "call", "Its declaration does not allow to connect there."),
    "GENERATION_REPLACED": _reason(
        Code.ABORTED, "run", "The document was replaced or deleted while it was ingested."
    ),
    "RUN_TOO_LONG": _reason(_BUSY, "run", "The run's events exceed what an agent service keeps."),
    "SCHEDULER_UNREACHABLE": _reason(_DOWN, "mesh", "No scheduler answers the agent service."),
    "STREAM_PROTOCOL": _reason(Code.INTERNAL, "call", "A model call ended without its end."),
    "LEASE_LOST": _reason(Code.ABORTED, "run", "Another agent service holds the run now."),
    # Stored runs and sessions. `limit` names the bound, a setting of the state service.
    "RUN_UNKNOWN": _reason(_NONE, "run", "No such run of this tenant."),
    "NOT_WAITING": _reason(
        _NOT_NOW, "run", "The run does not wait, or not at this step; `state` says how it is."
    ),
    "TOO_MANY_RUNS": _reason(
        _BUSY, "tenant", "The tenant has as many open runs as it may have.", delay=True
    ),
    "RUN_FULL": _reason(_NOT_NOW, "run", "The run is at a bound; it can only be ended."),
    "RUNS_FULL": _reason(_BUSY, "tenant", "The tenant's runs are at a bound.", delay=True),
    "SESSION_UNKNOWN": _reason(_NONE, "session", "No such session of this tenant."),
    "SESSION_BUSY": _reason(
        Code.ABORTED, "session", "A run has the session's turn; one turn at a time.", delay=True
    ),
    "SESSION_FULL": _reason(_NOT_NOW, "session", "The session is at a bound."),
    "SESSIONS_FULL": _reason(_BUSY, "tenant", "The tenant's sessions are at a bound.", delay=True),
}

INSTANCES: Final[Mapping[str, Reason]] = {
    "GRANT_MISSING": _reason(
        _MAY_NOT, "instance", "Work without a dispatch grant: it was sent past the gate."
    ),
    "GRANT_UNKNOWN_KEY": _reason(
        _MAY_NOT, "instance", "No scheduler that is known there signed the grant."
    ),
    "GRANT_SIGNATURE": _reason(
        _MAY_NOT, "instance", "The grant's signature is wrong, or it cannot be read."
    ),
    "GRANT_EXPIRED": _reason(_MAY_NOT, "instance", "The grant is not valid at this time."),
    "GRANT_AUDIENCE": _reason(_MAY_NOT, "instance", "The grant is for another instance."),
    "GRANT_REQUEST": _reason(_MAY_NOT, "instance", "The grant is for other work."),
    "MODEL_NOT_FOUND": _reason(_NONE, "instance", "The instance serves another model."),
    "CANNOT_GENERATE": _reason(_NOT_NOW, "instance", "The instance's model only embeds."),
    "NOT_A_GENERATOR": _reason(_NOT_NOW, "instance", "As CANNOT_GENERATE, of the engine."),
    "NO_GENERATION": _reason(_NOT_NOW, "instance", "As CANNOT_GENERATE, of the simulated engine."),
    "CANNOT_EMBED": _reason(_NOT_NOW, "instance", "The instance's model does not embed."),
    "NOT_AN_EMBEDDER": _reason(_NOT_NOW, "instance", "As CANNOT_EMBED, of the engine."),
    "NO_EMBEDDINGS": _reason(_NOT_NOW, "instance", "As CANNOT_EMBED, of the simulated engine."),
    "NOT_CONTINUABLE": _reason(
        _NOT_NOW, "instance", "An output that was begun elsewhere cannot go on there."
    ),
    "CONTINUATION_MISMATCH": _reason(
        _NOT_NOW, "instance", "As NOT_CONTINUABLE: its beginning does not fit."
    ),
    "FINGERPRINT_MISMATCH": _reason(
        _NOT_NOW, "instance", "As NOT_CONTINUABLE: it was begun with other weights."
    ),
    "NO_ROOM": _reason(_BUSY, "instance", "The instance has no room now.", delay=True),
    "TOKENIZER_BUSY": _reason(
        _BUSY, "instance", "Too many prompts wait to be tokenised.", delay=True
    ),
    "CONSTRAINTS_BUSY": _reason(
        _BUSY, "instance", "Too many output constraints wait to be compiled.", delay=True
    ),
    "CONSTRAINT_COMPILER_DOWN": _reason(
        _DOWN, "instance", "Output constraints cannot be compiled now.", delay=True
    ),
    "STREAM_NOT_READ": _reason(_BUSY, "instance", "A stream of frames was not read."),
    "ENGINE_DOWN": _reason(_DOWN, "instance", "The engine is not running."),
    "ENGINE_FAILED": _reason(_DOWN, "instance", "The engine failed."),
    "ENGINE_DIED": _reason(_DOWN, "instance", "The engine's process died."),
    "ENGINE_RESTARTED": _reason(_DOWN, "instance", "The engine was started again meanwhile."),
    "ENGINE_CLOSED": _reason(_DOWN, "instance", "The engine is going down."),
    "ENGINE_NOT_SERVING": _reason(_DOWN, "instance", "The engine does not serve now."),
    "STOPPING": _reason(_DOWN, "instance", "The instance is going down."),
    "INSTANCE_UNREACHABLE": _reason(_DOWN, "instance", "The instance cannot be reached."),
    "TOO_MANY_INSTANCES": Reason(
        (_DOWN, _BUSY), "mesh", "An execution service has as many instances as it takes."
    ),
}

EDGE: Final[Mapping[str, Reason]] = {
    "BAD_REQUEST": _reason(_BAD, "edge", "The HTTP request or its JSON is malformed."),
    "UNKNOWN_FIELD": _reason(_BAD, "edge", "A JSON field that no message has; it is named."),
    "NO_ROUTE": _reason(_NONE, "edge", "No such route."),
    "REQUEST_TIMEOUT": _reason(_LATE, "edge", "The request did not arrive in time."),
    "BODY_TOO_LARGE": _reason(_BAD, "edge", "HTTP 413: the JSON body exceeds its limit."),
    "HEADERS_TOO_LARGE": _reason(_BAD, "edge", "HTTP 431: the headers exceed their limit."),
    "NO_SCHEDULER": _reason(
        _DOWN, "edge", "No scheduler can be reached, or the edge sheds load.", delay=True
    ),
}

_ALL: Final[Mapping[str, Reason]] = {**INSTANCES, **EDGE, **ADMIN, **RUNS, **REQUESTS}


def complete(error: SluiceError) -> SluiceError:
    """The same error with ``scope`` and ``charged`` in its metadata. What it says itself holds;
    nothing else says that something was charged."""
    known = _ALL.get(error.reason)
    error.metadata = {
        "scope": known.scope if known is not None else "request",
        "charged": "false",
        **error.metadata,
    }
    return error


def code_of(reason: str) -> Code:
    """The code of a reason, the first if it comes with several; INTERNAL for an unknown one."""
    known = _ALL.get(reason)
    return Code.INTERNAL if known is None else known.codes[0]


_HEAD: Final = """\
# Errors

One contract over gRPC and HTTP. Every refusal has a code and `google.rpc.ErrorInfo` with a reason
(stable: branch on it), the domain `sluice`, and in its metadata `scope` (what it is about) and
`charged` (whether the tenant pays anything). `RetryInfo` says when asking again makes sense: the
delay comes from the state of queue or quota and is spread, so that those who were refused together
do not come back together. `BadRequest` names wrong fields, `QuotaFailure` the quota
(`quota_metric`), whose it is (`subject`, `tenant:NAME`) and its limit (`quota_value`).

Over HTTP the body is the `google.rpc.Status` as JSON, the delay also a `Retry-After` header in
whole seconds, and 401 carries `WWW-Authenticate`. What the edge itself refuses has the same body;
to a gRPC client it is a code and a text.

A request that was refused before it was queued costs nothing. One that failed later is charged for
its prompt and for what was delivered; `sluice explain REQUEST_ID` says what happened.

Made from [reasons.py](../sluice/reasons.py) by `python -m sluice.reasons > docs/ERRORS.md`.
"""


def render() -> str:
    """The page."""
    parts = [_HEAD]
    for title, reasons in (
        ("Requests", REQUESTS),
        ("Runs", RUNS),
        ("Administration", ADMIN),
        ("The edge", EDGE),
        ("Between services", INSTANCES),
    ):
        parts.append(f"\n## {title}\n\n| reason | code | HTTP | scope | delay | meaning |\n")
        parts.append("|---|---|---|---|---|---|\n")
        for name, one in reasons.items():
            codes = ", ".join(code.name for code in one.codes)
            status = ", ".join(str(HTTP_STATUS[code]) for code in one.codes)
            delay = "yes" if one.delay else "-"
            parts.append(
                f"| `{name}` | {codes} | {status} | {one.scope} | {delay} | {one.text} |\n"
            )
    return "".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render())
