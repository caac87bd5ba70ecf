"""Settings for all tests: hypothesis draws the same examples every time, and a slow machine is not a failure."""

import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "suite", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("suite")
torch.set_num_threads(1)
