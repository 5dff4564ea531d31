"""A module with tensors of its own, for tests of sources."""

import types

import torch

TABLE = torch.tensor([1.0, 2.0])
config = types.SimpleNamespace(OFFSET=torch.tensor(4.0))


def get_table():
    return TABLE
