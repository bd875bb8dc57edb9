"""The compiled paths that this machine can run, each in its turn."""

import pytest

from transcribe import kernels
from transcribe.errors import UsageError
from transcribe.kernels.library import PATHS, choose, chosen


def _runs(path: str) -> bool:
    try:
        choose(path)
    except UsageError:
        return False
    return True


BEFORE = chosen().path
COMPILED = [path for path in PATHS if path != "torch" and _runs(path)]
kernels.use(BEFORE)  # asking chose each of them in turn

# Installed without a compiler there is nothing to compare.
collect_ignore = [] if COMPILED else ["test_native.py", "test_separable.py", "test_steps.py"]


@pytest.fixture
def use():
    """`use(path)` for one test."""
    before = chosen().path
    yield kernels.use
    kernels.use(before)


@pytest.fixture(params=COMPILED)
def compiled(request, use):
    """Each path that the library has and this processor can run, in use."""
    use(request.param)
    return request.param
