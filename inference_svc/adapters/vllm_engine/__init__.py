"""vLLM behind the engine port: ``AsyncLLM`` in this process, its engine core in children.

Where to look: ``engine`` (the port), ``launch`` and ``processes`` (start, end, orphans),
``sampling`` and ``text`` (from our words to vLLM's), ``generation`` and ``continuation`` (one
request), ``stats`` (the engine's own statistics), ``constraint_checker`` (structured output is
compiled first in a process that may be killed). Imports neither vLLM nor torch before an engine
starts.
"""
