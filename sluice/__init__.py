"""Shared runtime of the services (deadlines, errors, lifecycle, frames) and the `sluice` command.

Holds no domain rules and imports no service: the services import it.
"""

__version__ = "0.1.0"
