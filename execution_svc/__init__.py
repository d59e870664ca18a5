"""How an admitted request runs; relays frames between schedulers and instances."""
