"""A model's attention, as paths: `logit_paths` finds them, `survey` also says what it left alone and why."""

from quacklr.find.survey import logit_paths, survey

__all__ = ["logit_paths", "survey"]
