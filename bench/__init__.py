"""Benchmarks: one module per claim; each prints a table and writes bench/results/<name>.json."""
