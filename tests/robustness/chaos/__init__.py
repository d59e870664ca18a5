"""Runs with tools under SIGKILL of each process at random moments; `python -m
tests.robustness.chaos`."""
