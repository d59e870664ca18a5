"""The kinds of tools."""
