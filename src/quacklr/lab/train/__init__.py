"""Training: the loop, its folder and checkpoints, and the command `quacklr train`."""
