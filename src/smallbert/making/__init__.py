"""Making models: a recipe run phase by phase, one model with its card, many side by side, and what is told before."""
