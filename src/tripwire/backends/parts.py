"""Parts: the stretches of a graph between its cuts, each compiled as a graph of its own.

A part is compiled when it first runs, with the tensors that it gets then. So its inputs share
memory as they do on every later call.

Parts run in the order of the graph. Calls that enter and leave contexts stay outside the parts,
which are compiled and run inside these contexts.

If sizes or numbers are open, the parts are compiled at once, since what a compiler assumes about
them is a condition of the whole entry. Parts don't pass open numbers to each other: each part
computes those that it uses, from the inputs and the tensors that they come from.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from tripwire.backends.backwards import (
    Settling,
    find_freed,
    joins_pasts,
    passes_gradients,
    wants_grad,
    written_by,
)
from tripwire.backends.cuts import Cuts, find_maker, find_pasts, runs_user_code
from tripwire.backends.floats import iter_takers
from tripwire.backends.handover import OPEN, one_round
from tripwire.backends.limits import BEGINS, add_views, find_changed, list_calls
from tripwire.reading.tensors import OUTSIDE, TensorMeta, meta_of, storage_of
from tripwire.rulebook.rules import Target
from tripwire.tracing.graphs import build_module
from tripwire.tracing.open.opening import FAKE, NUMBER, OPEN_INPUT, NumberInput, OpenTensor
from tripwire.tracing.result import name_of
from tripwire.tracing.state import FACTS, PAST, STATE, NodeFacts
from tripwire.values.classes import isinstance

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow

Runtime = Callable[..., Any]
Compile = Callable[[fx.GraphModule, Sequence[torch.Tensor]], Runtime]


def cut(
    module: fx.GraphModule, cuts: Cuts, compile_part: Compile, examples: Sequence[torch.Tensor]
) -> Runtime:
    """A runtime for a graph, with calls that run as they are."""
    if cuts.whole is not None:
        return module.forward
    run = _Cutter(module, cuts, compile_part, examples).build().forward

    def run_parts(*inputs: Any) -> Any:
        with one_round():
            return run(*inputs)

    return run_parts


class Part:
    """A stretch of a graph, which is compiled when it first runs, or at once for these examples.

    Its inputs from other parts, and from calls between them, must have the same form as then, and
    share memory in the same way: user code may have chosen another dtype, and `.grad` may be
    anything. If they differ, the stretch runs uncompiled.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        compile_part: Compile,
        made: tuple[int, ...],
        examples: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._module = module
        self._compile = compile_part
        self._made = made  # positions of what isn't an input of the whole
        nodes = module.graph.find_nodes(op="placeholder")
        self._open = frozenset(i for i in made if nodes[i].meta.get(FAKE) is not None)
        self._shares = any(written_by(node) for node in module.graph.nodes)
        self._forms: list[object] = []
        self._sharing = made
        self._runtime: Runtime | None = None
        if examples is not None:
            self._runtime = compile_part(module, examples)
            forms: list[Any] = [nodes[index].meta[FACTS].value for index in made]
            self._forms = [self._form_of(*pair) for pair in zip(made, forms, strict=True)]

    def _form_of(self, index: int, meta: TensorMeta) -> object:
        if index not in self._open:
            return meta
        return len(meta.shape), meta.dtype, meta.device, meta.requires_grad

    def __call__(self, *inputs: Any) -> Any:
        runtime = self._runtime
        forms = [self._form_of(index, meta_of(inputs[index])) for index in self._made]
        sharing = _find_sharing(inputs, self._made) if self._shares else self._sharing
        if runtime is None:
            runtime = self._compile(self._module, inputs)
            self._forms, self._sharing = forms, sharing
        elif forms != self._forms or sharing != self._sharing:
            return self._module.forward(*inputs)
        outputs = runtime(*inputs)
        if isinstance(runtime, Settling):
            runtime = runtime.settled
        self._runtime = runtime
        return outputs


def _find_sharing(inputs: Sequence[Any], made: tuple[int, ...]) -> tuple[int, ...]:
    """Of what was made: which input has the same memory, one of the whole's if there is one."""
    others = [
        i for i in range(len(inputs)) if i not in made and isinstance(inputs[i], torch.Tensor)
    ]
    first: dict[int, int] = {}
    for index in (*others, *made):
        first.setdefault(storage_of(inputs[index]), index)
    return tuple(first[storage] if (storage := storage_of(inputs[i])) != -1 else i for i in made)


class _Cutter:
    """Copies a graph; each stretch of calls that may be compiled becomes one call."""

    def __init__(
        self,
        module: fx.GraphModule,
        cuts: Cuts,
        compile_part: Compile,
        examples: Sequence[torch.Tensor],
    ) -> None:
        self._module = module
        self._shadow: Shadow | None = module.meta.get(OPEN)
        inputs = module.graph.find_nodes(op="placeholder")
        self._examples = dict(zip(inputs[len(inputs) - len(examples) :], examples, strict=True))
        self._grad_mode = torch.is_grad_enabled()
        self._contexts = 0  # besides
        self._why = cuts.why
        self._joints = cuts.joints
        self._compile = compile_part
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        has_past = any(node.meta.get(PAST) for node in module.graph.nodes)
        self._keeps_apart = has_past or runs_user_code(module.graph)
        self._freed = list(find_freed(module.graph))
        self._given: dict[fx.Node, None] = {}  # inputs of the whole
        tensors = (node for node in inputs if NUMBER not in node.meta)
        self._views = {node: frozenset({node}) for node in tensors}  # of inputs: which it may be
        add_views(list_calls(module.graph), self._views)
        self._changed: set[fx.Node] = set()  # inputs, in place, so far
        self._open: list[fx.Node] = []  # the stretch so far
        self._parts = 0

    def build(self) -> fx.GraphModule:
        for node in self._module.graph.nodes:
            if node.op == "placeholder":
                self._given[node] = None
                self._copy(node)
            elif node.op == "get_attr" or NUMBER in node.meta:  # copied to where they are used
                continue
            elif self._is_plain(node):
                self._close()
                self._copy(node)
                self._note_context(node)
            else:
                if BEGINS in node.meta:
                    self._close()
                joints = self._joints.intersection(node.all_input_nodes)
                if not joints.isdisjoint(self._open) and passes_gradients(node.meta[FACTS]):
                    self._close()
                self._open.append(node)
        return build_module(self._module, self._graph, "Cut")

    def _is_plain(self, node: fx.Node) -> bool:
        if node.op == "output" or node in self._why:
            return True
        maker = find_maker(node)
        if maker is not None:  # results of one call are one value, which no part can return
            return maker not in self._open
        facts: NodeFacts = node.meta[FACTS]
        given = (one for one in node.all_input_nodes if one.op != "get_attr")
        return facts.value is None and all(one.meta[FACTS].value is None for one in given)

    def _note_context(self, node: fx.Node) -> None:
        if node.target is torch._C._set_grad_enabled:
            self._grad_mode = bool(node.args[0])
        elif name_of(node).startswith(("_enter_", "_exit_")):
            self._contexts += 1 if name_of(node).startswith("_enter_") else -1

    def _copy(self, node: fx.Node) -> None:
        self._copies[node] = self._graph.node_copy(node, self._find)
        self._changed |= self._find_changed(node)

    def _find(self, node: fx.Node) -> fx.Node:
        if node not in self._copies and (node.op == "get_attr" or NUMBER in node.meta):
            self._copy(node)
        return self._copies[node]

    def _close(self) -> None:
        """End the stretch."""
        stretch, self._open = self._open, []
        inside = set(stretch)
        found = dict.fromkeys(one for node in stretch for one in _iter_givers(node))
        given = [one for one in found if one not in inside and one.op != "get_attr"]
        given += self._find_defining(given)
        given.sort(key=lambda one: one.meta.get(NUMBER) is None)  # numbers come first
        outputs = [
            node for node in stretch if any(user not in inside for user in iter_takers(node))
        ]
        is_hidden = self._shadow is not None and self._contexts > 0
        acts = any(OUTSIDE in written_by(node) for node in stretch)
        is_plain = (
            not (outputs or acts)
            or is_hidden
            or self._writes_badly(stretch, given)
            or self._outlives_backward(outputs)
        )
        changed = frozenset().union(*map(self._find_changed, stretch))
        kept = self._find_kept(given, outputs, changed)
        is_plain = is_plain or any(map(kept.intersection, map(self._origins_of, outputs)))
        copied = {node for node in given if not kept.isdisjoint(self._origins_of(node))}
        made = tuple(i for i, node in enumerate(given) if node not in self._given or node in copied)
        if not is_plain:
            module = self._build_part(stretch, given, outputs)
            pasts = (*find_pasts(given), *(made if self._keeps_apart else ()))
            is_plain = joins_pasts(module.graph, pasts)
        if is_plain:
            for node in stretch:
                self._copy(node)
            return
        with torch.set_grad_enabled(self._grad_mode):
            part = Part(module, self._compile, made, self._find_examples(given))
        target = Target(part, f"part_{self._parts}")
        values = [
            self._graph.call_method("clone", (found,)) if node in copied else found
            for node, found in zip(given, map(self._find, given), strict=True)
        ]
        called = self._graph.call_function(target, tuple(values))
        self._changed |= changed
        for index, node in enumerate(outputs):
            self._copies[node] = self._graph.call_function(operator.getitem, (called, index))
        self._parts += 1

    def _origins_of(self, node: fx.Node) -> frozenset[fx.Node]:
        """The inputs of the whole that this is, or may be a view of."""
        return self._views.get(node, frozenset())

    def _find_changed(self, node: fx.Node) -> frozenset[fx.Node]:
        """The inputs of the whole that a call changes in place."""
        return find_changed(node, self._views) if written_by(node) else frozenset()

    def _find_kept(
        self, given: list[fx.Node], outputs: list[fx.Node], changed: frozenset[fx.Node]
    ) -> frozenset[fx.Node]:
        """Inputs that a part may keep for its backward, and that the next call changes before it.

        Plain autograd may keep what was computed of them, so the part gets copies. What the part
        changes itself isn't kept (limits.py).
        """
        if not any(wants_grad(node.meta[FACTS].value) for node in outputs):
            return frozenset()
        read = frozenset().union(*map(self._origins_of, given))
        return (read & self._changed) - changed

    def _find_defining(self, given: list[fx.Node]) -> Iterator[fx.Node]:
        """Inputs of the whole that tell the symbols of which sizes that a part gets are computed.

        Inductor takes no size 2*s0 for an input, also of a backward, if nothing tells it s0.
        """
        if self._shadow is None:
            return
        needed = {one for node in given for size in _sizes_of(node) for one in size.free_symbols}
        told = {size for node in given for size in _sizes_of(node) if size.is_Symbol}
        for node in self._given:
            is_number = node.meta.get(NUMBER) is not None
            found = (needed if is_number else needed - told).intersection(_sizes_of(node))
            needed -= found
            if found and node not in given:
                yield node

    def _find_examples(self, given: Iterable[fx.Node]) -> list[torch.Tensor] | None:
        """What a part is compiled for at once, where something is open."""
        if self._shadow is None:
            return None
        tensors = [node for node in given if NUMBER not in node.meta]
        fakes = self._shadow.fakes
        return [
            self._examples[node]
            if node in self._examples
            else fakes.make_like(node.meta[FACTS].value, node.meta.get(FAKE))
            for node in tensors
        ]

    def _outlives_backward(self, outputs: list[fx.Node]) -> bool:
        """Whether a backward goes through some results, and others may get a gradient later.

        A part has one backward for all of its results, which lets go of what it needs.
        """
        wanting = [node for node in outputs if wants_grad(node.meta[FACTS].value)]
        return any(
            not may_be.isdisjoint(wanting) and not surely.issuperset(wanting)
            for may_be, surely in self._freed
        )

    def _writes_badly(self, stretch: list[fx.Node], given: Iterable[fx.Node]) -> bool:
        """Whether it changes what AOTAutograd can't change.

        That is a result of another part through which gradients go: the value before is kept for
        the backward, and then written over. And memory of which it gets two tensors: both become
        views of a third, and neither is handed back itself.
        """
        written = {memory for node in stretch for memory in node.meta[FACTS].written}
        met: set[int] = set()
        for node in given:
            facts: NodeFacts = node.meta[FACTS]
            changed = written.intersection(facts.memory)
            if changed and node not in self._given:
                if not isinstance(facts.value, TensorMeta) or facts.value.requires_grad:
                    return True
            if not changed.isdisjoint(met):
                return True
            met |= changed
        return False

    def _build_part(
        self, stretch: list[fx.Node], given: Iterable[fx.Node], outputs: list[fx.Node]
    ) -> fx.GraphModule:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in given:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
            copies[node].meta[STATE] = bool(node.meta.get(STATE)) and node in self._given

        def find(node: fx.Node) -> fx.Node:
            if node not in copies and (node.op == "get_attr" or NUMBER in node.meta):
                copies[node] = graph.node_copy(node, find)
            return copies[node]

        for node in stretch:
            copies[node] = graph.node_copy(node, find)
        graph.output(tuple(copies[node] for node in outputs))
        module = build_module(self._module, graph, f"Part{self._parts}")
        if self._shadow is not None:
            module.meta[OPEN] = self._shadow
        return module


def _sizes_of(node: fx.Node) -> list[Any]:
    """The open sizes of a part's input, as torch has them; of a number, itself."""
    from tripwire.tracing.open.symbols import expression_of  # imports sympy, as the shadow did

    number: NumberInput | None = node.meta.get(NUMBER)
    opened: OpenTensor | None = node.meta.get(OPEN_INPUT)
    fake: Any = opened.fake if opened is not None else node.meta.get(FAKE)
    sizes = () if fake is None else (*fake.size(), *fake.stride())
    found = map(expression_of, sizes if number is None else [number.symbol])
    return [size for size in found if not isinstance(size, int)]


def _iter_givers(node: fx.Node) -> Iterator[fx.Node]:
    """What a call gets; in the place of an open number, what that is computed from."""
    for one in node.all_input_nodes:
        if NUMBER in one.meta and one.op != "placeholder":
            yield from _iter_givers(one)
        else:
            yield one
