"""The random calls of a run, and how to run them again."""

import draws
import libraries
import pytest


@pytest.fixture(params=range(draws.SEED, draws.SEED + draws.COUNT_ON_CPU), ids="seed-{}".format)
def draw(request):
    return draws.Draw(request.param)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(
        f"random calls: PARITY_SEED={draws.SEED} PARITY_DRAWS={draws.COUNT_ON_CPU}; "
        f"arrays of {', '.join(libraries.NAMES)}"
    )
