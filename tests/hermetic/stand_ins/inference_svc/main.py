"""Stands in for the inference service."""

from stand_in import main

main("inference", "SLUICE_INFERENCE_BIND")
