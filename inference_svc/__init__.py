"""The pure inference layer: model execution as a function of its input."""
