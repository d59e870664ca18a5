"""Rules of the execution service; pure."""
