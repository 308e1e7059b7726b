"""Measuring: predictions and scores with error bars, what a model costs, its card, limits on it."""
