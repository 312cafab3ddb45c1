"""Shared by all tests: torch's global state is put back, Hydra's singleton is cleared."""

import gc

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

gc.freeze()  # what is imported stays: the collections of the memory meter need not walk through it


@pytest.fixture(autouse=True)
def same_torch_for_every_test():
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    yield
    torch.set_num_threads(threads)
    torch.set_default_dtype(dtype)
    GlobalHydra.instance().clear()
