"""How fast models are, side by side, and which of those that hold the score is the fastest."""
