"""Calls that fail, by name. Each function makes one; the environment says where records go."""

import functools
import time

import torch
from torch import nn

import tripwire
from cornershop import prices
from cornershop.prices import Basket, Till, check_price


def ones():
    return torch.ones(4)


# --- refusals ---


def reads_clock(x):
    y = x * 2
    time.monotonic()
    return y


def unsupported_operation():
    tripwire.compile(reads_clock, fullgraph=True)(ones())


def weigh(x):
    y = torch.rand(4) + x
    if y.sum() > 0:
        return y
    return -y


def tensor_branch():
    tripwire.compile(weigh, fullgraph=True)(ones())


# --- user exceptions ---


def pay(x):
    y = x + 1
    return check_price(y * 10)


def user_exception():
    tripwire.compile(pay)(ones())


def torch_error():
    def multiply(x):
        return x @ torch.ones(5, 5)

    tripwire.compile(multiply)(ones())


def missing_argument():
    tripwire.compile(pay)()


# --- back ends ---


def broken_backend(module, inputs):
    raise NotImplementedError(f"no code for {len(list(module.graph.nodes))} nodes")


def backend_error():
    tripwire.compile(prices.with_tax, backend=broken_backend)(ones())


def failing_runtime(module, inputs):
    def run(*args):
        args[0].add_(0)
        raise ArithmeticError(f"runtime with {len(args)} inputs")

    return run


def in_place(x):
    x.add_(1)
    return x * 2


def runtime_error():
    compiled = tripwire.compile(in_place, backend=failing_runtime)
    compiled(torch.ones(1 << 17))  # too large to be undone
    compiled(torch.ones(1 << 17))  # too large to be undone


# --- errors inside tripwire ---


def forgetful_backend(module, inputs):
    return lambda *args: ()  # not what the graph returns


def internal_error():
    compiled = tripwire.compile(prices.with_tax, backend=forgetful_backend)
    compiled(ones())
    compiled(ones())


# --- closures, modules, methods ---


def make_counter(step):
    total = torch.zeros(1)

    def count(x):
        nonlocal total
        total = total + step
        return check_price(x.sum() * 10 + total)

    return count


def closure():
    tripwire.compile(make_counter(3))(ones())


def module():
    torch.manual_seed(0)
    tripwire.compile(Till(4))(torch.ones(3, 4))


def module_in_eval():
    torch.manual_seed(0)
    tripwire.compile(Till(4).eval())(torch.ones(3, 4))


def function_of_a_user_module():
    tripwire.compile(check_price)(ones() * 10)


def bound_method():
    basket = Basket([ones(), ones()])
    basket.items.append("bread")
    tripwire.compile(basket.total)()


def partial():
    tripwire.compile(functools.partial(torch.reshape, shape=(3, 5)))(ones())


def lazily(x):
    from cornershop import prices as found

    return found.check_price(x * 10)


def import_inside():
    tripwire.compile(lazily)(ones())


def sequential():
    tripwire.compile(nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3)))(ones())


def hit_on_values():
    def take(x, index):
        x.add_(1)
        return x[index]

    compiled = tripwire.compile(take)
    compiled(ones(), torch.tensor([1]))
    compiled(ones(), torch.tensor([9]))


def refused_and_plain():
    @tripwire.compile
    def slow(x, wanted):
        time.monotonic()
        x.mul_(2)
        return x.reshape(wanted)

    for _ in range(4):
        slow(ones(), (2, 2))
    slow(ones(), (3, 3))


CASES = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and not value.__code__.co_argcount
    and name not in ("ones",)
}
