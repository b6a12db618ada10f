"""Commands of tests say nothing about their progress, however slow the machine is."""

import pytest

from dpftrl.cli import output


@pytest.fixture(autouse=True, scope="session")
def _quiet_progress():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "FIRST_BEAT", 3600.0)
        yield
