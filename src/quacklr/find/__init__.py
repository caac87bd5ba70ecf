"""Finds the attention modules of a model, and the paths of their logits: `logit_paths`."""

from quacklr.find.discover import logit_paths

__all__ = ["logit_paths"]
