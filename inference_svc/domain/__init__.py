"""Rules of the inference service; pure."""
