"""Training: the loop, the folder and checkpoints of a run, and the command `quacklr train`."""
