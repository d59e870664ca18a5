"""The rules of runs; pure."""
