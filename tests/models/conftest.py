"""Models are tiny: one thread is enough, and on a busy machine a pool of two waits for itself."""

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package", autouse=True)
def compared_before():
    """torch's first comparison imports sympy, which registers abstract classes: that retires."""
    torch.testing.assert_close(torch.ones(1), torch.ones(1))
