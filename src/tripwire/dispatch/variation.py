"""Variation: what of a callable's calls varies, and so is left open when it is traced again.

The first trace is plain. What differs on a miss from what the traces before it found is open in the
next one: sizes of tensors, ints and floats. With dynamic=True all of them are open from the start,
with dynamic=False none ever is. `torch._dynamo.mark_dynamic` and its kin are heeded. What a run had
to close isn't opened again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tripwire.errors import CannotTrace
from tripwire.reading.binding import build_binding
from tripwire.reading.sources import Attr, Cell, Global, Item, Local, Roots, Source
from tripwire.reading.tensors import PLAIN_TENSORS
from tripwire.tracing import Trace
from tripwire.tracing.opening import Opening
from tripwire.values.classes import is_exactly, isinstance
from tripwire.values.contents import own_dict


class Variation:
    """Of one callable's calls."""

    def __init__(self, dynamic: bool | None) -> None:
        self._dynamic = dynamic
        self._shapes: dict[str, tuple[int, ...]] = {}  # of tensors, by path, as first found
        self._sources: dict[str, Source] = {}
        self._numbers: dict[str, object] = {}
        self._dims: dict[str, set[int]] = defaultdict(set)  # that vary
        self._varying: set[str] = set()  # numbers
        self._static: set[tuple[str, int | None]] = set()  # what a run had to close, or is marked
        self._namespaces: dict[str, dict[str, Any]] = {}
        self._gave_up = False
        self._takes_floats = True
        self._asks_for_types = False

    def look(
        self, target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Opening | None:
        """What to leave open in a trace of this call."""
        if self._dynamic is False or self._gave_up:
            return None
        try:
            binding = build_binding(target)
            bound = binding.bind(args, kwargs)
        except (CannotTrace, TypeError):  # the call itself says why
            return None
        passed = set(binding.expressions(args, kwargs))
        for path, tensor in self._find_tensors(binding.roots(bound, self._namespaces)):
            self._look_at_marks(path, tensor)
            self._compare(path, tensor)
        for value, source in binding.sources(bound):
            if isinstance(source, Local) and source.name not in passed:
                continue
            self._look_at_number(str(source), value)
            if str(source) not in self._sources and isinstance(value, torch.Tensor):
                self._look_at_marks(str(source), value)
                self._compare(str(source), value)
        dims = {
            path: frozenset(d for d in found if (path, d) not in self._static)
            for path, found in self._dims.items()
        }
        numbers = frozenset(
            path
            for path in self._varying
            if (path, None) not in self._static
            and not self._asks_for_types
            and (self._takes_floats or is_exactly(self._numbers[path], int))
        )
        opening = Opening({path: found for path, found in dims.items() if found}, numbers)
        if not opening:
            return None
        from tripwire.tracing.shadow import can_open  # imports much

        return opening if can_open() else None

    def _find_tensors(self, roots: Roots) -> Iterator[tuple[str, torch.Tensor]]:
        """Tensors of this call that are where earlier traces found some."""
        for path, source in self._sources.items():
            found = _find(source, roots)
            if isinstance(found, torch.Tensor):
                yield path, found

    def _compare(self, path: str, tensor: torch.Tensor) -> None:
        if id(type(tensor)) not in PLAIN_TENSORS or tensor.layout is not torch.strided:
            return
        shape = tuple(tensor.shape)
        before = self._shapes.setdefault(path, shape)
        if self._dynamic:
            self._dims[path].update(range(len(shape)))
        elif len(before) == len(shape):
            pairs = enumerate(zip(before, shape, strict=True))
            self._dims[path].update(i for i, (old, new) in pairs if old != new)

    def _look_at_number(self, path: str, value: object) -> None:
        if is_exactly(value, int) or (is_exactly(value, float) and self._takes_floats):
            before = self._numbers.setdefault(path, value)
            if self._dynamic or (type(before) is type(value) and before != value):
                self._varying.add(path)

    def _look_at_marks(self, path: str, tensor: torch.Tensor) -> None:
        """What users said of a tensor with torch's own functions."""
        marks: Any = own_dict(tensor) or {}
        for name in ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices"):
            self._dims[path].update(marks.get(name, ()))
        for dim in marks.get("_dynamo_static_indices", ()):
            self._static.add((path, dim))

    def note(self, trace: Trace) -> None:
        """Remember what a trace found, and what it had to close."""
        completion = trace.completion
        assert completion is not None
        self._namespaces = trace.namespaces
        carried = {str(one.source) for one in completion.effects.carried}
        for wanted, sources in zip(trace.inputs, completion.sources, strict=True):
            path = str(wanted.source)
            if path in carried or not any(anchored for _, anchored in sources):
                self._sources.setdefault(path, wanted.source)
                self._shapes.setdefault(path, wanted.meta.shape)
        # `type(n) is int` tells an open number from a plain one.
        self._asks_for_types |= completion.asks_for_types
        if trace.shadow is not None:
            self._static.update(trace.shadow.closed)

    def note_refused(self, slug: str) -> None:
        """A run with something open was refused. It may be taken where nothing is."""
        if slug != "another-thread":  # bad luck
            self._gave_up = True

    def give_up(self, *, floats_only: bool = False) -> None:
        """Leave nothing open any more, or no floats."""
        if floats_only:
            self._takes_floats = False
        else:
            self._gave_up = True


def _find(source: Source | None, roots: Roots) -> object:
    """What a path leads to, found without running any code of the user's; None if that fails."""
    if isinstance(source, Local):
        return roots.locals.get(source.name)
    if isinstance(source, Global):
        return roots.namespaces.get(source.module, {}).get(source.name)
    if isinstance(source, Cell) and source.function is None:
        return source.fetch(roots)
    if isinstance(source, Attr):
        owner = _find(source.owner, roots)
        spaces: list[Any] = [own_dict(owner) or {}]
        if isinstance(owner, nn.Module):
            spaces += [spaces[0].get(table, {}) for table in ("_buffers", "_modules")]
        held = (space[source.name] for space in spaces if source.name in space)
        return next(held, None)
    if isinstance(source, Item):
        owner = _find(source.owner, roots)
        if is_exactly(owner, dict):
            return owner.get(source.key)  # type: ignore[attr-defined]
        if is_exactly(owner, list, tuple) and is_exactly(source.key, int):
            items: Any = owner
            index: Any = source.key
            return items[index] if index < len(items) else None
    return None
