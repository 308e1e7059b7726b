"""Plain training on the task's own labels: the baseline of everything."""

from smallbert.methods.train import Train


class Finetune(Train):
    """Train the whole encoder and its head on the task."""
