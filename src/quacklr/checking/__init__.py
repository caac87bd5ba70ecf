"""The wiring proof: steps and nudges on a copy of a model show whether every head's rows are its own."""

from quacklr.checking.prove import check

__all__ = ["check"]
