"""The encoder: its parts and where each family keeps them, how it is run, cut, saved and loaded."""
