"""The only client of Redis: what the mesh must not forget."""
