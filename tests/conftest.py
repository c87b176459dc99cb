"""Hypothesis draws the same examples in every run: a red test stays red until it is mended."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "penstock",
    derandomize=True,
    deadline=None,  # two slow cores, shared
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("penstock")
