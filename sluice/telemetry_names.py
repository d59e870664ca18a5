"""The registry of span, attribute and metric names: the only place where one is spelled.

Names follow the OpenTelemetry GenAI conventions where they exist (``gen_ai.*``); the others begin
with ``sluice.``. Request and tenant ids belong on spans, never on metrics: a metric's labels are
listed here and bounded. Pure data.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# --- Spans: one per layer and request, none per token or frame -----------------------------------

SPAN_REQUEST = "sluice.scheduler.request"  # from the first byte to the terminal message
SPAN_QUEUE = "sluice.scheduler.queue"  # from submission to the dispatch that counted
SPAN_RELAY = "sluice.execution.relay"  # one start, from its frame in to its end out
SPAN_EXECUTE = "sluice.execution.execute"  # plain Execute and ExecuteEmbed
SPAN_GENERATE = "sluice.inference.generate"  # the engine's work for one start
SPAN_EMBED = "sluice.inference.embed"
SPAN_STEP = "sluice.agent.step"  # a model call, or the tool calls that it asked for
SPAN_TOOL = "sluice.agent.tool"  # one call of a tool, its waiting and checks included
SPANS = frozenset(
    {
        SPAN_REQUEST,
        SPAN_QUEUE,
        SPAN_RELAY,
        SPAN_EXECUTE,
        SPAN_GENERATE,
        SPAN_EMBED,
        SPAN_STEP,
        SPAN_TOOL,
    }
)

# --- Attributes ----------------------------------------------------------------------------------

ATTR_REQUEST_MODEL = "gen_ai.request.model"
ATTR_INPUT_TOKENS = "gen_ai.usage.input_tokens"
ATTR_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
ATTR_FINISH_REASONS = "gen_ai.response.finish_reasons"
ATTR_ERROR_TYPE = "error.type"  # an error's reason, never its text
ATTR_TOOL = "gen_ai.tool.name"
ATTR_REQUEST_ID = "sluice.request_id"
ATTR_TENANT = "sluice.tenant"
ATTR_CLASS = "sluice.priority_class"
ATTR_INSTANCE = "sluice.instance"
ATTR_ATTEMPT = "sluice.attempt"
ATTR_ATTEMPTS = "sluice.attempts"
ATTR_FRAME = "sluice.frame"  # number of the frame, on its stream, that brought the start
ATTR_OUTCOME = "sluice.outcome"
ATTR_CACHED_TOKENS = "sluice.cached_tokens"
ATTR_QUEUE_MS = "sluice.queue_ms"
ATTR_TTFT_MS = "sluice.ttft_ms"
ATTR_TPOT_MS = "sluice.tpot_ms"
ATTR_SIMULATED = "sluice.simulated"
ATTR_RUN_ID = "sluice.run_id"
ATTR_STEP = "sluice.step"  # its number in the run
ATTR_STEP_KIND = "sluice.step.kind"  # model, tools

# --- Metrics -------------------------------------------------------------------------------------


class Kind(Enum):
    """Counters only grow; gauges are readings; histograms are recorded, once per request."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


SERIES_MAX = 256  # label combinations of one metric; more become "other"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_PER_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2)


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric: its unit is a UCUM code (``s``, ``By``, ``{token}``), ``labels`` all it may have.

    ``buckets`` are a histogram's upper bounds in its unit."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    series_max: int = SERIES_MAX
    buckets: tuple[float, ...] = ()


def _counter(name: str, unit: str, help_: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, unit, help_, labels)


def _gauge(name: str, unit: str, help_: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, unit, help_, labels)


def _histogram(
    name: str, unit: str, help_: str, buckets: tuple[float, ...], *labels: str
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, help_, labels, SERIES_MAX, buckets)


# Runtime, every service.
RPC_CALLS = _counter(
    "sluice.rpc.calls", "{call}", "Calls ended, by method and code.", "method", "code"
)
RPC_OPEN = _gauge("sluice.rpc.open", "{call}", "Calls in progress.", "method")
LOOP_LAG = _gauge(
    "sluice.loop.lag", "s", "Longest lateness of the event loop since the last reading."
)
HEALTH = _gauge("sluice.health", "1", "1 while a component is up, else 0.", "component")
CONFIG_RELOADS = _counter("sluice.config.reloads", "{reload}", "Reloads by result.", "result")

# Scheduler.
REQUESTS = _counter(
    "sluice.requests", "{request}", "Requests ended, by outcome.", "class", "outcome"
)
QUEUE_DEPTH = _gauge("sluice.queue.depth", "{request}", "Requests waiting.", "class")
RUNNING = _gauge("sluice.running", "{request}", "Requests running, by instance.", "instance")
OPEN_STREAMS = _gauge("sluice.streams.open", "{stream}", "Client streams open.", "class")
BUFFERED = _gauge("sluice.streams.buffered", "{character}", "Text waiting for clients.")
TENANT_TOKENS = _counter("sluice.tokens", "{token}", "Tokens delivered, by direction.", "direction")
INSTANCES = _gauge("sluice.instances", "{instance}", "Instances by state.", "state")
BREAKER_OPENED = _counter(
    "sluice.breaker.opened", "{opening}", "How often a breaker opened.", "instance"
)
RETRIES = _counter(
    "sluice.retries", "{attempt}", "Attempts that the retry budget decided on.", "result"
)
POISONED = _gauge("sluice.poisoned", "{input}", "Inputs by what they are known for.", "state")
MOVES = _counter(
    "sluice.moves", "{request}", "Requests that went on later or elsewhere, by cause.", "cause"
)
INDEX_BYTES = _gauge("sluice.index.bytes", "By", "Memory of the search indexes of this process.")
LIMIT_HITS = _counter("sluice.limit.hits", "{hit}", "How often a named bound was hit.", "limit")
QUEUE_TIME = _histogram("sluice.queue.time", "s", "Time in the queue.", _SECONDS, "class")
TTFT = _histogram(
    "gen_ai.server.time_to_first_token", "s", "Arrival to first token.", _SECONDS, "class"
)
TPOT = _histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Time per token after the first.",
    _PER_TOKEN,
    "class",
)
REQUEST_TIME = _histogram(
    "gen_ai.server.request.duration", "s", "Arrival to end.", _SECONDS, "class", "outcome"
)

AGENT_VERDICTS = _counter(
    "sluice.agent.verdicts", "{request}", "What the agent gate said.", "verdict", "reason"
)
RUN_WATCHES = _gauge("sluice.run.watches", "{watch}", "Runs that clients watch.")
AGENT_NOT_NEEDED = _counter(
    "sluice.agent.not_needed", "{run}", "Runs for which a direct call would have done.", "tenant"
)
AGENT_EXTRA_COST = _counter(
    "sluice.agent.not_needed.cost", "1", "What they cost beyond a direct call.", "tenant"
)
DECISIONS_KEPT = _counter("sluice.decisions.kept", "{record}", "Decision records kept.")
DECISIONS_DROPPED = _counter(
    "sluice.decisions.dropped", "{record}", "Decision records that the state service did not get."
)
DECISIONS_BYTES = _gauge("sluice.decisions.ring", "By", "Decision records kept in memory.")

QUOTA_RESERVATIONS = _counter(
    "sluice.quota.reservations",
    "{reservation}",
    "Reservations of tenants with quotas: from leases, by asking, uncounted.",
    "way",
)
QUOTA_REFUSALS = _counter("sluice.quota.refusals", "{refusal}", "Refusals, by quota.", "quota")
QUOTA_LEASED = _gauge("sluice.quota.leased", "1", "What is left of leases, by amount.", "amount")
QUOTA_EXCHANGES = _counter(
    "sluice.quota.exchanges", "{exchange}", "Exchanges with the state service.", "result"
)
QUOTA_EXCHANGE_TIME = _gauge(
    "sluice.quota.exchange.slowest", "s", "Longest exchange since the last reading."
)
USAGE_WAITING = _gauge("sluice.usage.waiting", "{sum}", "Usage not told to the state service yet.")
USAGE_LOST = _counter("sluice.usage.lost", "{request}", "Requests whose usage was not kept.")

# Agent.
RUNS_ACTIVE = _gauge("sluice.runs.active", "{run}", "Runs that this process holds.")
RUNS_ENDED = _counter("sluice.runs.ended", "{run}", "Runs ended here.", "end", "reason")
RUN_STEPS = _counter("sluice.runs.steps", "{step}", "Model calls of runs, by result.", "result")
RUN_TOOL_CALLS = _counter("sluice.runs.tool_calls", "{call}", "Tool calls of runs.")
RUN_LEASES_LOST = _counter("sluice.runs.leases_lost", "{lease}", "Runs that others took over.")
RUN_HISTORY = _gauge("sluice.runs.history", "By", "Events of held runs that are kept in memory.")
# Agent: tools. Of tools that tenants registered the label is "registered".
TOOL_CALLS = _counter("sluice.tool.calls", "{call}", "Calls ended.", "tool", "outcome")
TOOL_TIME = _histogram("sluice.tool.time", "s", "Time of a call.", _SECONDS, "tool")
TOOLS_RUNNING = _gauge("sluice.tool.running", "{call}", "Calls in progress.")
TOOL_BREAKER_OPENED = _counter("sluice.tool.breaker.opened", "{opening}", "Tools put to rest.")
EGRESS_REFUSALS = _counter("sluice.egress.refusals", "{connection}", "Refused.", "rule")

# Frames, scheduler and execution and inference.
FRAMES = _counter("sluice.frames", "{frame}", "Frames by direction.", "direction")
FRAME_STREAMS = _gauge("sluice.frames.streams", "{stream}", "Frame streams open.", "direction")
STREAM_LOSSES = _counter("sluice.frames.losses", "{stream}", "Frame streams broken.", "kind")

# Inference.
ENGINE_RUNNING = _gauge("sluice.engine.running", "{request}", "Sequences the engine runs.")
ENGINE_WAITING = _gauge("sluice.engine.waiting", "{request}", "Sequences the engine has queued.")
ENGINE_KV_USED = _gauge("sluice.engine.kv.used", "{token}", "KV cache in use.")
ENGINE_KV_FREE = _gauge("sluice.engine.kv.free", "{token}", "KV cache free.")
ENGINE_PREFIX_HITS = _gauge("sluice.engine.prefix_hit_rate", "1", "Prefix cache hits, 0 to 1.")
ENGINE_TOKENS = _counter("sluice.engine.tokens", "{token}", "Tokens generated.", "direction")
ENGINE_ABORTS = _counter("sluice.engine.aborts", "{request}", "Sequences aborted.", "reason")
STARTS = _counter("sluice.engine.starts", "{start}", "Starts by result.", "result")
GPU_UTILIZATION = _gauge("sluice.gpu.utilization", "1", "GPU busy share, 0 to 1.", "gpu")
GPU_MEMORY_USED = _gauge("sluice.gpu.memory.used", "By", "GPU memory in use.", "gpu")
GPU_POWER = _gauge("sluice.gpu.power", "W", "GPU power.", "gpu")
GPU_TEMPERATURE = _gauge("sluice.gpu.temperature", "Cel", "GPU temperature.", "gpu")

METRICS: dict[str, Metric] = {
    metric.name: metric for metric in list(globals().values()) if isinstance(metric, Metric)
}
