"""A model's attention, as paths: `logit_paths` finds them, and says what it left alone and why."""

from quacklr.find.discover import logit_paths

__all__ = ["logit_paths"]
