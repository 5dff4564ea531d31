"""What the failing functions use."""

import dataclasses

import torch
from torch import nn

RATES = {"vat": torch.tensor([0.19, 0.07])}
UNUSED = torch.zeros(1000)
LIMIT = 5.0


class TooDear(Exception):
    """An exception of the user's own."""

    def __init__(self, price, limit):
        super().__init__(f"{price} is above {limit}")
        self.price = price


def with_tax(x):
    return x * (1 + RATES["vat"][0])


def check_price(x):
    price = with_tax(x).sum().item()
    if price > LIMIT:
        raise TooDear(round(price, 3), LIMIT)
    return x


@dataclasses.dataclass
class Basket:
    items: list
    note: str = ""

    def total(self):
        return sum(item.sum() for item in self.items)


class Till(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weigh = nn.Linear(size, size)
        self.norm = nn.BatchNorm1d(size)
        self.register_buffer("seen", torch.zeros(()))
        self.drawers = nn.ModuleList(Drawer(size) for _ in range(2))

    def forward(self, x):
        y = self.norm(self.weigh(x))
        self.seen += 1
        for drawer in self.drawers:
            y = drawer(y)
        return y


class Drawer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x.reshape(self.size, -1, 7)
