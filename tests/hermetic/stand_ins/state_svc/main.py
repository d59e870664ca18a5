"""Stands in for the state service."""

from importlib import import_module

# By name: it is found beside this package only in the folder that the test made.
import_module("stand_in").main("state", "SLUICE_STATE_BIND")
