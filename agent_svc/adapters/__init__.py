"""What connects the rules of runs to the state service, the scheduler and tools."""
