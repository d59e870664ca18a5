"""Stands in for the scheduler service."""

from stand_in import main

main("scheduler", "SLUICE_SCHEDULER_BIND")
