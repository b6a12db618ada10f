"""One profile for every property test: the same examples on every machine, and no clock."""

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=50,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    # Drawing matrices row by row is slow on a cold start, which says nothing about the library.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")
