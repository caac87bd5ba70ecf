"""Finds the paths of a model's attention by running it on a batch and differentiating its logits."""
