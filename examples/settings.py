"""Somebody else's file, which changes a value of the model's."""

from torch import nn


def change(model: nn.Module) -> None:
    """Turn the scale down."""
    model.scale = 0.5
