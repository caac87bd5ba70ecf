"""`check`: tests on a copy of a model that the rows on each head's paths, and no others, make the head's logits."""

from quacklr.checking.prove import check

__all__ = ["check"]
