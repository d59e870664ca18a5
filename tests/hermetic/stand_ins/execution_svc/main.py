"""Stands in for the execution service."""

from stand_in import main

main("execution", "SLUICE_EXECUTION_BIND")
