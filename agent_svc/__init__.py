"""The agent service: works off durable runs, one step after the other."""
