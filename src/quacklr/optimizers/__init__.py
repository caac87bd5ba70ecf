"""Optimizers: whether their steps can be scaled, and which tensors they step."""
