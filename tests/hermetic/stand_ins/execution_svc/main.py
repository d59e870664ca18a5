"""Stands in for the execution service."""

from importlib import import_module

# By name: it is found beside this package only in the folder that the test made.
import_module("stand_in").main("execution", "SLUICE_EXECUTION_BIND")
