"""Sweeps: executing many runs on this machine or on a cluster, and the command `quacklr sweep`."""
