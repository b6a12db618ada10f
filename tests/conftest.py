"""The same on every machine: one profile for property tests, and no lines about progress."""

import pytest
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


@pytest.fixture(autouse=True, scope="session")
def _quiet_progress():
    """Commands say nothing about their progress, unless a test asks for it."""
    from dpftrl.cli import output  # here, because most tests need no command line

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "FIRST_BEAT", 3600.0)
        yield
