"""Following: each torch call of the run is made again on fake tensors with symbolic sizes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from tripwire.reading.tensors import iter_given
from tripwire.rulebook.rules import SETATTR, Call, words
from tripwire.tracing.open.fakes import BY_VALUES
from tripwire.tracing.open.opening import FAKE, FORMED, Opening
from tripwire.tracing.open.spellings import SPELLED, MadeCall, find_form, find_spelling
from tripwire.tracing.open.symbols import is_open_symbol
from tripwire.tracing.sizes import KEEP_SHAPES
from tripwire.tracing.state import TracingState
from tripwire.values.classes import is_exactly, isinstance
from tripwire.values.numbers import OpenFloat, is_open, is_taken, iter_leaves, map_leaves

if TYPE_CHECKING:
    from tripwire.tracing.open.shadow import Shadow


class Follower:
    """Makes calls of one run again on fakes."""

    __slots__ = ("_fakes", "_opening", "_shadow", "_state")

    def __init__(self, shadow: Shadow, state: TracingState, opening: Opening) -> None:
        self._shadow = shadow
        self._fakes = shadow.fakes
        self._state = state
        self._opening = opening

    def follow(
        self, rule: Call, func: Callable[..., Any], args: Any, kwargs: Any, value: Any
    ) -> None:
        """Do in the shadow what a call did, and see which sizes of its result are open."""
        results = list(iter_given(value))
        if any(map(self._shadow.is_sized_by_values, iter_given((args, kwargs)))):
            if not (self._shadow.asks_for_counts and self._keeps_forms(rule, args, results)):
                sizes = [leaf for leaf in iter_leaves((args, kwargs)) if not is_taken(leaf)]
                why = "a size of its argument depends on values"
                self._shadow.close_arguments(sizes, f"{rule.name} ({why})")
        elif any(map(self._shadow.is_sized_by_values, results)):
            if not (
                self._shadow.asks_for_counts or self._sizes_by_values_alone(rule, args, kwargs)
            ):
                self._shadow.close_arguments((args, kwargs), f"{rule.name} ({BY_VALUES})")
        elif rule.opaque or (rule.target is SETATTR and self._shadow.has_open(args)):
            self._shadow.close_arguments((args, kwargs), rule.name)
        elif rule.name in _OF_NUMBERS and not list(iter_given((args, kwargs))):
            pass  # no number decides on its sizes
        elif _is_handed_back(rule, (args, kwargs), value):
            pass  # it has its fake; torch's fake call would copy it, with other strides perhaps
        elif results:
            in_place = rule.writes or kwargs.get("out") is not None
            with self._state.aside():
                if rule.name in _OF_FORMS:
                    args, kwargs = self._spell_floats(rule, (args, kwargs))
                spelling = find_spelling(func, args, kwargs, self._fakes.find)
                form = (
                    None
                    if spelling is not None or self._opening.whole
                    else find_form(MadeCall(func, args, results), self._fakes.find)
                )
                told = spelling or form or self._find_told(func)
                fakes = self._fakes.imitate(told, args, kwargs, in_place=in_place)
                self._shadow.note_decisions(rule.name)
                why = fakes if isinstance(fakes, str) else ""
                if isinstance(fakes, str) or not self._fakes.are_alike(fakes, results):
                    why = why or "its result has another form than torch predicts"
                    self._shadow.close_arguments((args, kwargs), f"{rule.name} ({why})")
                    return
                self._put(results, fakes)
                if spelling is not None:
                    self._state.node_of(results[0]).meta[SPELLED] = spelling
                if form is not None:
                    made: Any = self._state.node_of(results[0])
                    made = made.args[0] if len(results) > 1 else made
                    made.meta[FORMED] = True

    def _find_told(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """What tells the form of a call's results; the call itself, mostly."""
        return _TOLD.get(func, func) if self._state.has_levels else func

    def _put(self, tensors: list[torch.Tensor], fakes: list[Any]) -> None:
        """Tensors that a call gave have the sizes of these fakes."""
        for tensor, fake in zip(tensors, fakes, strict=True):
            self._fakes.put(tensor, fake)
            known = self._state.values.find(tensor)
            if known is not None and known.node is not None:
                known.node.meta[FAKE] = self._fakes.find(tensor)

    def _spell_floats(self, rule: Call, given: Any) -> Any:
        """Floats as they are in this run: the shadow computes forms, and they decide on none."""
        floats = [leaf for leaf in iter_leaves(given) if is_exactly(leaf, OpenFloat)]
        for number in floats if "dropout" in rule.name else ():
            if 0 < number.value < 1:
                self._shadow.decide(operator.gt, number, 0, True)
                self._shadow.decide(operator.lt, number, 1, True)
            else:  # its result is its argument, or zero, or it raises
                self._shadow.close(number, rule.name)
        return map_leaves(given, lambda leaf: leaf.value if is_exactly(leaf, OpenFloat) else leaf)

    def _keeps_forms(self, rule: Call, args: Any, results: list[torch.Tensor]) -> bool:
        """Whether a result, whose form no values decide on, is known to have its argument's."""
        known = [one for one in results if one.dim() and not self._shadow.is_sized_by_values(one)]
        if not known or not args or rule.name not in KEEP_SHAPES:
            return not known
        fake = self._fakes.find(args[0])
        if fake is None:
            return True
        found: list[Any] | str = [fake]
        if known[0] is not args[0]:
            with self._state.aside():
                found = self._fakes.imitate(torch.empty_like, args[:1], {}, in_place=False)
        if isinstance(found, str) or not self._fakes.are_alike(found, known):
            return False
        self._put(known, found)
        return True

    def _sizes_by_values_alone(self, rule: Call, args: Any, kwargs: Any) -> bool:
        """Whether values decide on the first size of a result, and no open size on the others."""
        if kwargs or rule.name in ("nonzero", "argwhere"):
            return not kwargs
        if rule.name == "_pack_padded_sequence":
            fake = self._fakes.find(args[0])
            return fake is None or not any(map(is_open_symbol, fake.size()[2:]))
        if len(args) != 2 or not all(isinstance(arg, torch.Tensor) for arg in args):
            return False
        owner, mask = args
        if mask.dtype is not torch.bool or rule.name not in ("__getitem__", "masked_select"):
            return False
        fake = self._fakes.find(owner)
        kept = () if fake is None else fake.size()[mask.dim() :]
        is_broadcast = rule.name == "masked_select" and mask.dim() != owner.dim()
        return not is_broadcast and not any(map(is_open_symbol, kept))


def _form_gradients(
    outputs: Any, inputs: Any, grad_outputs: Any = None, **_: Any
) -> tuple[torch.Tensor, ...]:
    """What gradients look like: fakes have no graph of autograd's. vmap goes over all or none."""
    zeros = [tensor.sum() * 0 for tensor in iter_given((outputs, grad_outputs))]
    zero = functools.reduce(operator.add, zeros)
    return tuple(torch.empty_like(one) + zero.to(one.dtype) for one in iter_given(inputs))


def _form_alike(tensor: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    """The level that vmap opened knows how many examples there are as a plain number alone."""
    return torch.empty_like(tensor)


_TOLD: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.autograd.grad: _form_gradients,
    **dict.fromkeys((functional.dropout, torch.dropout), _form_alike),
    **dict.fromkeys((torch.rand_like, torch.randn_like), _form_alike),
}


def _is_handed_back(rule: Call, given: Any, value: object) -> bool:
    """Whether a dropout gave its very argument, as it does for all sizes: in evaluation, say."""
    leaves = list(iter_leaves(given)) if "dropout" in rule.name else []
    return any(leaf is value for leaf in leaves) and not any(map(is_open, leaves))


# Torch's own code takes the value of a float that these get; no float decides on a size there.
_OF_FORMS = words(
    "layer_norm rms_norm group_norm batch_norm instance_norm local_response_norm normalize "
    "scaled_dot_product_attention multi_head_attention_forward cross_entropy "
    "dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout "
    "huber_loss smooth_l1_loss triplet_margin_loss margin_ranking_loss hinge_embedding_loss "
    "cosine_embedding_loss poisson_nll_loss gaussian_nll_loss cosine_similarity "
    "pairwise_distance cdist dist renorm quantile nanquantile isclose "
    "normal bernoulli normal_ bernoulli_ uniform_ exponential_ log_normal_ cauchy_ geometric_"
)
_OF_NUMBERS = words("tensor as_tensor asarray scalar_tensor")
