"""Weights that several processes hold together, and the collectives that put their norms together."""
