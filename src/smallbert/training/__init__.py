"""Training: a phase and what its methods attach to it, one step, one loop, checkpoints that survive a kill."""
