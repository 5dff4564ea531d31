"""Graphs: what runs one, and calls that stand for a graph of their own."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import fx, nn
from torch._C import _functorch
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import PythonCode

from tripwire.rulebook.rules import Target
from tripwire.values.classes import isinstance


class GraphOnDemand(_LazyGraphModule):
    """A graph's module. Its Python code is made when it is first needed, as that of Dynamo's is.

    What fx keeps of the generated source goes when the module does.
    """

    __jit_unused_properties__ = [*fx.GraphModule.__jit_unused_properties__, "code"]  # noqa: RUF012

    def _lazy_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.real_recompile()
        return self.forward(*args, **kwargs)  # not __call__, which prints what is raised

    forward = _lazy_forward

    def __prepare_scriptable__(self) -> GraphOnDemand:
        """What torch.jit.script asks for: it reads the code."""
        self.real_recompile()
        return self

    def _real_recompile(self) -> PythonCode:
        code = super()._real_recompile()
        key = type(self).forward.__code__.co_filename
        weakref.finalize(self, _forget_source, key).atexit = False
        return code


def build_module(root: nn.Module, graph: fx.Graph, name: str) -> fx.GraphModule:
    """A graph's module, which takes what the graph names from another."""
    return GraphOnDemand(root, graph, class_name=name)


def _forget_source(key: str) -> None:
    linecache.cache.pop(key, None)
    fx.graph_module._loader.eval_cache.pop(key, None)


class Level(Target):
    """A function that opens or closes a level of torch.func's, or wraps a tensor for one."""


class Outline(Target):
    """A call that runs a graph of its own, and leaves no level of torch.func's open."""

    def __init__(self, graph: fx.Graph, name: str) -> None:
        super().__init__(build_module(nn.Module(), graph, name).forward, name)
        self.graph = graph

    def __call__(self, *args: Any) -> Any:
        depth = _functorch.get_dynamic_layer_stack_depth()
        may_require_grad = _functorch.get_inplace_requires_grad_allowed()
        forward = torch._C._is_fwd_grad_enabled()
        try:
            return self.call(*args)
        except BaseException:
            with suppress(RuntimeError):  # none is open
                torch._C._exit_dual_level(level=0)
            _functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
            _functorch.set_inplace_requires_grad_allowed(may_require_grad)
            torch._C._set_fwd_grad_enabled(forward)
            raise


def iter_calls(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """The calls among nodes; in the place of an outline, those inside."""
    for node in nodes:
        if isinstance(node.target, Outline):
            yield from iter_calls(node.target.graph.nodes)
        elif node.op in ("call_function", "call_method"):
            yield node


def any_inside(ask: Callable[[fx.Node], bool]) -> Callable[[fx.Node], bool]:
    """Ask a node; or, where it stands for a graph of its own, the calls of that."""

    def asked(node: fx.Node) -> bool:
        if isinstance(node.target, Outline):
            return any(map(ask, iter_calls([node])))
        return ask(node)

    return asked
