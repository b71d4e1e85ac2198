import pytest
import torch
from hypothesis import settings

settings.register_profile("whybn", deadline=None, derandomize=True)
settings.load_profile("whybn")


@pytest.fixture(autouse=True)
def _one_torch_thread():
    """Two workers on two cores fight unless each keeps to one thread (and sums depend on the count)."""
    torch.set_num_threads(1)
