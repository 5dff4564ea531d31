"""World: all that a walk found, as it was at one moment, to be compared with and to be put back."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tripwire.auditing.holdings import Contents, Holding
from tripwire.auditing.images import (
    Camera,
    Image,
    ImageNode,
    Plain,
    TensorImage,
    copy_values,
    find_difference,
    form_of,
    memory_of,
)
from tripwire.auditing.walking import Walk
from tripwire.values.classes import isinstance

_BY_VALUE = (bool, int, float, complex, str, bytes, tuple, frozenset)


@dataclass(frozen=True, slots=True)
class _SavedTensor:
    """A tensor as it was."""

    path: str
    tensor: torch.Tensor
    form: tuple[Any, ...]
    data: torch.Tensor  # the same memory, in the form that it had
    values: torch.Tensor | None
    grad: torch.Tensor | None
    history: object  # grad_fn

    @staticmethod
    def of(path: str, tensor: torch.Tensor, earlier: _SavedTensor | None) -> _SavedTensor:
        with torch._C.DisableTorchFunction():
            is_known = earlier is not None and earlier.is_in_form() and earlier.has_values()
            return _SavedTensor(
                path,
                tensor,
                form_of(tensor),
                tensor.detach(),
                # One copy serves all moments at which the values were the same.
                earlier.values if earlier is not None and is_known else copy_values(tensor),
                tensor.grad if tensor.is_leaf else None,
                tensor.grad_fn,
            )

    def is_in_form(self) -> bool:
        return form_of(self.tensor) == self.form and self.tensor.grad_fn is self.history

    def has_values(self) -> bool:
        return self.values is None or _same_bits(self.tensor.detach(), self.values)

    def put_back(self) -> None:
        tensor = self.tensor
        if not self.is_in_form() or memory_of(tensor) != memory_of(self.data):
            if self.history is None and tensor.grad_fn is not None:
                tensor.detach_()
            tensor.data = self.data
            if tensor.is_leaf:
                tensor.requires_grad_(self.form[-1])
        if not self.has_values():
            assert self.values is not None
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.detach().copy_(self.values)
        if tensor.is_leaf and tensor.grad is not self.grad:
            tensor.grad = self.grad


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if torch.equal(left, right):
        return True
    return bool(left.is_floating_point() and torch.equal(left.isnan(), right.isnan())) and bool(
        torch.equal(left.nan_to_num(), right.nan_to_num())
    )


class Chance:
    """Random generators, as they were; and the counter that torch names hooks by."""

    def __init__(self, generators: list[torch.Generator]) -> None:
        default = [torch.default_generator, *torch.cuda.default_generators]
        self._torch = [(g, g.get_state()) for g in (*default, *generators)]
        self._python = random.getstate()
        self._next_hook = RemovableHandle.next_id
        numpy: Any = sys.modules.get("numpy")
        self._numpy = None if numpy is None else (numpy.random, numpy.random.get_state())

    def put_back(self) -> None:
        """As they were."""
        for generator, state in self._torch:
            generator.set_state(state)
        random.setstate(self._python)
        RemovableHandle.next_id = self._next_hook
        if self._numpy is not None:
            self._numpy[0].set_state(self._numpy[1])

    def take(self) -> Image:
        """How far each has been used."""
        states = [(f"generator {i}", _image_of(g)) for i, (g, _) in enumerate(self._torch)]
        python = Plain(Chance, str(hash(random.getstate())))
        return ImageNode(Chance, (*states, ("Python's", python)))


def _image_of(generator: torch.Generator) -> Image:
    state = generator.get_state()
    return TensorImage(torch.Generator, form_of(state), "", state)


class World:
    """One moment of a walk."""

    def __init__(self, walk: Walk, earlier: World | None = None) -> None:
        self._walk = walk
        known = {} if earlier is None else {id(k.tensor): k for k in earlier.tensors()}
        self._held: list[tuple[Holding, Contents]] = [(h, h.contents()) for h in walk.holdings]
        self._tensors: list[_SavedTensor] = [
            _SavedTensor.of(path, tensor, known.get(key))
            for key, (path, tensor) in walk.tensors.items()
        ]
        self._arrays = [(path, array, array.copy()) for path, array in walk.arrays]
        self._chance = Chance(walk.generators)
        self._memories = {memory_of(k.tensor): k.path for k in self._tensors if memory_of(k.tensor)}

    def tensors(self) -> list[_SavedTensor]:
        """Tensors as they were."""
        return self._tensors

    def put_back(self) -> None:
        """Everything is as it was."""
        for holding, contents in self._held:
            holding.rewrite(contents)
        for kept in self._tensors:
            kept.put_back()
        for _, array, values in self._arrays:
            if array.flags.writeable:  # what it shows of another's memory is put back there
                array[...] = values
        self._chance.put_back()

    def camera(self) -> Camera:
        """For images of what a call returned and left behind."""
        return Camera(self._walk.known, self._memories)

    def take_changes(self, camera: Camera) -> Image:
        """What is otherwise now."""
        parts: list[tuple[str, Image]] = []
        for holding, contents in self._held:
            parts += _take_changed(holding, contents, camera)
        for kept in self._tensors:
            if not kept.is_in_form() or not kept.has_values():
                form, values = form_of(kept.tensor), copy_values(kept.tensor)
                parts.append((kept.path, TensorImage(type(kept.tensor), form, "", values)))
            if kept.tensor.is_leaf and kept.tensor.grad is not kept.grad:
                name = f"{kept.path}.grad"
                parts.append((name, camera.take(kept.tensor.grad, name)))
        for path, array, values in self._arrays:
            if array.tobytes() != values.tobytes():
                parts.append((path, Plain(type(array), repr(array))))
        return ImageNode(World, (*parts, ("random state", self._chance.take())))

    def leaves(self) -> list[tuple[str, torch.Tensor]]:
        """Tensors that gradients can be asked of."""
        return [
            (kept.path, kept.tensor)
            for kept in self._tensors
            if kept.tensor.is_leaf and kept.tensor.requires_grad
        ]


def _take_changed(holding: Holding, contents: Contents, camera: Camera) -> list[tuple[str, Image]]:
    now = holding.contents()
    parts: list[tuple[str, Image]] = []
    for key in [*contents, *(key for key in now if key not in contents)]:
        path = holding.spell(key)
        if key not in now:
            parts.append((path, Plain(World, "gone")))
        elif key not in contents or not _is_same(now[key], contents[key], camera):
            parts.append((path, camera.take(now[key], path)))
    return parts


def _is_same(now: Any, before: Any, camera: Camera) -> bool:
    """One object, or two that nobody can tell apart but by identity."""
    if now is before:
        return True
    if type(now) is not type(before) or not isinstance(now, _BY_VALUE):
        return False
    return not find_difference(camera.take(before, ""), camera.take(now, ""))
