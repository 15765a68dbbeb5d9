import pytest
import torch


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    """One thread (the suite runs on every core already) and a fixed seed, for every test."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
