"""Property tests run the same examples every time and are not timed one by one."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "laws", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("laws")
