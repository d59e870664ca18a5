"""Rules of the state service; pure."""
