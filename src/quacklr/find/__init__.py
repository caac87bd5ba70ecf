"""Finds the attention modules of a model, and the paths of their logits."""
