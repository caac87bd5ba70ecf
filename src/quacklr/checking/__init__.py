"""`check`: compares the rows of a model with a measurement, and its logits in real steps with the bound."""

from quacklr.checking.check import check

__all__ = ["check"]
