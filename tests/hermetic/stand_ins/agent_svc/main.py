"""Stands in for the agent service."""

from importlib import import_module

# By name: it is found beside this package only in the folder that the test made.
import_module("stand_in").main("agent", "SLUICE_AGENT_BIND")
