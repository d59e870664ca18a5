"""Shared runtime of the services (deadlines, errors, lifecycle, telemetry, frames), `sluice` command.

Holds no domain rules and imports no service: the services import it.
"""

__version__ = "0.1.0"
