"""Rules: what recording does with each torch function that a run calls.

Every function gets a rule when it is first called. A function that is in none of the tables here
is recorded as a call, and if it returns something other than a tensor to Python, that is a branch.
So a gap in the tables costs an unneeded branch, never a baked value (L2).
"""

from __future__ import annotations

import copy
import gc
import operator
import sys
from collections.abc import Callable
from functools import cache
from types import (
    BuiltinFunctionType,
    CodeType,
    FrameType,
    FunctionType,
    MethodDescriptorType,
    MethodWrapperType,
)
from typing import Any, Literal

import torch
from msgspec import Struct
from msgspec.structs import replace
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from tripwire.env import is_library_module, is_own_file, torch_path
from tripwire.rulebook.written import (
    WrittenArguments,
    find_written,
    find_written_by,
    list_overloads,
)
from tripwire.values.classes import isinstance

# As they are; while a run is observed, the names in builtins stand for others.
GETATTR, SETATTR, DELATTR = getattr, setattr, delattr


class Call(Struct, frozen=True):
    """A call of it is recorded as one node."""

    op: Literal["call_function", "call_method"]
    target: Any  # a callable, or a method's name
    name: str  # the function's own name, without class or overload
    attribute: str | None = None  # second argument of getattr and setattr nodes
    writes: bool = False  # changes its first argument in place
    writes_also: WrittenArguments | None = None
    may_write: bool = True  # its arguments are looked at after the call
    sized_by_data: bool = False  # the result's shape can depend on values
    takes_sizes: bool = False  # so can the result's of this, where a size is a tensor
    splits: bool = False  # the number of results depends on a shape
    opaque: bool = False  # Python or scripted code runs inside: any size may depend on values
    of_shapes: bool = False  # the result's values depend on the arguments' shapes alone
    as_it_is: str | None = None  # why no compiler may look inside; None: it may
    may_draw: bool = False  # whether it draws random numbers shows when it runs


class Query(Struct, frozen=True):
    """A call of it reads metadata only, and is never recorded."""

    name: str
    of_size: bool  # a branch where the tensor's size depends on values
    of_strides: bool = False
    of_grad: bool = False  # whether a gradient is wanted, and what would compute it


class Refuse(Struct, frozen=True):
    """A run that calls it is refused, for this reason."""

    slug: str
    reason: str
    of_modes: bool = False  # it asks for torch-function modes, so tripwire's has to go first


Rule = Call | Query | Refuse


def words(text: str) -> frozenset[str]:
    """Words of a text, as a set."""
    return frozenset(text.split())


_SIZE_QUERIES = words(
    "shape size __len__ numel nelement nbytes stride is_contiguous is_same_size "
    "storage_offset dim_order"
)
_STRIDE_QUERIES = words("stride is_contiguous storage_offset dim_order _is_view")
_GRAD_QUERIES = words("requires_grad is_leaf grad_fn")
_QUERIES = _SIZE_QUERIES | words(
    "dtype device ndim dim ndimension layout requires_grad is_leaf grad_fn names name itemsize "
    "element_size "
    "is_cuda is_cpu is_xpu is_ipu is_hpu is_mps is_maia is_meta is_mkldnn is_mtia is_nested "
    "is_ort is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_floating_point is_complex "
    "is_signed is_conj is_neg is_inference is_pinned is_shared is_distributed "
    "is_tensor has_names get_device sparse_dim dense_dim _is_view _is_zerotensor qscheme "
    "result_type can_cast promote_types broadcast_shapes grad_dtype __dir__ "
    "_has_compatible_shallow_copy_type"
)
SIZED_BY_DATA = words(
    "nonzero argwhere masked_select unique unique_consecutive unique_dim _unique2 _unique "
    "_unique_impl _unique_consecutive_impl _return_output _return_inverse _return_counts "
    "_consecutive_return_output _consecutive_return_inverse _consecutive_return_counts "
    "bincount where repeat_interleave __getitem__ tensor_split to_sparse to_sparse_csr "
    "to_sparse_csc to_sparse_coo sparse_coo_tensor coalesce one_hot _pack_padded_sequence "
    "_pad_packed_sequence linalg_lstsq _ctc_loss unique_dim_consecutive "
    "values _values indices _indices col_indices row_indices"  # of sparse tensors
)
# Functions whose first argument is a size; that of others is the tensor to work on.
SIZED_FIRST = words(
    "arange range linspace logspace zeros ones full empty eye rand randn randint randperm "
    "tril_indices triu_indices hann_window hamming_window blackman_window bartlett_window "
    "kaiser_window"
)
# Sizes among the arguments: where one is a tensor, the result's size depends on its value.
_TAKES_SIZES = SIZED_FIRST | words(
    "new_zeros new_ones new_full new_empty view reshape expand repeat tile narrow unflatten "
    "split split_with_sizes chunk as_strided pad unfold interpolate resize_ broadcast_to "
    "__getitem__ topk diag diagonal diag_embed multinomial fft ifft rfft irfft hfft ihfft stft "
    "istft tensordot movedim select_scatter slice_scatter vander tril triu roll combinations "
    "cartesian_prod"
)
_SPLITS = words("unbind split chunk tensor_split split_with_sizes hsplit vsplit dsplit")
_STORAGE = (
    "it gives access to a tensor's memory, and tripwire can't see what is done with it. Do it "
    "outside the traced function."
)
_CALLBACK = (
    "it registers a Python function that would run later, outside the graph. Register it outside "
    "the traced function."
)
_PER_NUMBER = (
    "it calls a Python function with each number, and a graph holds tensors. Write it with "
    "functions of tensors, or call it outside the traced function."
)
_REFUSED = {
    **dict.fromkeys(
        words(
            "data_ptr untyped_storage storage _typed_storage __dlpack__ __dlpack_device__ "
            "share_memory_ __reduce_ex__ __setstate__ __cuda_array_interface__ _storage is_set_to"
        ),
        Refuse("tensor-memory", _STORAGE),
    ),
    **dict.fromkeys(
        words("register_hook register_post_accumulate_grad_hook"),
        Refuse("callable-argument", _CALLBACK),
    ),
    **dict.fromkeys(words("apply_ map_ map2_"), Refuse("callable-argument", _PER_NUMBER)),
}
_TRANSFORM = Refuse(
    "function-transform",
    "this transform of torch.func traces the function or replaces its tensors, and a graph can't "
    "hold that. Call it outside the traced function.",
)
_UNFOLLOWED_TRANSFORMS = words("functionalize wrapped linearize jvp_fn restore_vmap inner")
_COMPILES = words("setup_compilation_env")
_CUSTOM_FUNCTION = Refuse(
    "function-transform",
    "a custom autograd function runs inside a transform of torch.func, which calls its code in "
    "ways that a graph can't hold. Write it with torch's own operators, or call it outside.",
)
_HIGHER_ORDER = Refuse(
    "higher-order-operator",
    "torch.cond of a tensor, while_loop, flex_attention and their like have Dynamo compile the "
    "functions that they are given, and tripwire doesn't see what these read. Write the branch or "
    "loop in plain Python, or call it outside the traced function.",
)
_RESEEDED = Refuse(
    "generator-reseeded",
    "the state of torch's random generator is set, and a graph wouldn't set it again. Seed "
    "outside, or pass a torch.Generator.",
)
_SAVED_HOOKS = Refuse(
    "backward-hook",
    "hooks on saved tensors are Python functions that would run in the backward, outside the "
    "graph.",
)
_DISPATCH_MODE = Refuse(
    "dispatch-mode", "a TorchDispatchMode is entered here, and what it does can't be followed."
)
_INNER_CONTEXT = Refuse(
    "inner-context",
    "inference mode is entered by a function meant for graphs, such as another trace's. Call the "
    "plain function.",
)
STATE_SET = Refuse(
    "torch-state-changed",
    "one of torch's flags is set here, and a graph wouldn't set it again. Set it outside.",
)
_STATE_SETTERS = words(
    "set_default_dtype set_default_tensor_type set_default_device use_deterministic_algorithms "
    "set_deterministic_debug_mode set_float32_matmul_precision"
)
_SWAPPED = Refuse(
    "tensor-memory", "swap_tensors exchanges two tensors, and a graph can't hold that."
)
COMPILED = Refuse(
    "torch-compile-inside",
    "a function compiled by torch.compile runs here, and this trace can't see into it. Trace "
    "the plain function.",
)
_BACKWARD_STEP = Refuse(
    "unknown-c-function",
    "compiled autograd runs a step of the backward here, a C++ function that no graph can hold.",
)
_SHARDED = Refuse(
    "communicates",
    "a wrapper for distributed training runs here. Compile what is inside: the module "
    "that DistributedDataParallel wraps, or the `forward` of each module that fully_shard was "
    "called on.",
)
_COLLECTIVE = Refuse(
    "communicates",
    "communicates with other processes, and compiled code wouldn't do it again. Compile the code "
    "before and after it.",
)
_COLLECTIVES = words(
    "all_gather all_gather_coalesced all_gather_object all_gather_into_tensor all_gather_single "
    "all_reduce all_reduce_coalesced all_to_all all_to_all_single barrier monitored_barrier "
    "broadcast broadcast_object_list gather gather_object reduce reduce_scatter "
    "reduce_scatter_tensor reduce_scatter_single scatter scatter_object_list send recv isend irecv "
    "send_object_list recv_object_list batch_isend_irecv init_process_group destroy_process_group "
    "new_group new_subgroups new_subgroups_by_enumeration split_group shrink_group"
)
_SEEDING = words(
    "manual_seed manual_seed_all seed seed_all set_rng_state set_rng_state_all fork_rng"
)


@cache
def _refused_file(filename: str) -> tuple[Refuse, frozenset[str] | None] | None:
    """Files of torch whose functions can't be followed; all of them, or those named."""
    path = torch_path(filename)
    if path is None:
        return None
    if path.startswith("_higher_order_ops/"):
        return _HIGHER_ORDER, _COMPILES
    if path in ("_functorch/vmap.py", "_functorch/eager_transforms.py"):
        return _TRANSFORM, _UNFOLLOWED_TRANSFORMS
    if path == "_functorch/autograd_function.py":
        return _CUSTOM_FUNCTION, None
    if path.endswith("random.py"):
        return _RESEEDED, _SEEDING
    if path == "autograd/grad_mode.py":
        return _INNER_CONTEXT, frozenset({"_enter_inference_mode"})
    if path == "autograd/graph.py":
        return _SAVED_HOOKS, frozenset({"__enter__"})
    if path == "utils/_python_dispatch.py":
        return _DISPATCH_MODE, frozenset({"__enter__"})
    if path == "__init__.py":
        return STATE_SET, _STATE_SETTERS
    if path == "utils/__init__.py":
        return _SWAPPED, frozenset({"swap_tensors"})
    if path.startswith("distributed/fsdp/") or path == "nn/parallel/distributed.py":
        return _SHARDED, None
    if path == "distributed/distributed_c10d.py":  # from 3.12 on, C calls inside aren't seen
        return _COLLECTIVE, _COLLECTIVES
    if path == "_dynamo/eval_frame.py":
        return COMPILED, frozenset({"compile_wrapper"})
    if path == "_dynamo/compiled_autograd.py":
        return _BACKWARD_STEP, frozenset({"__call__"})
    return None


def find_refused_code(code: CodeType) -> Refuse | None:
    """The refusal for a Python function of torch's that no torch-function mode sees."""
    found = _refused_file(code.co_filename)
    if found is None or (found[1] is not None and code.co_name not in found[1]):
        return None
    return found[0]


_OPERATORS: dict[str, Callable[..., object]] = {
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
    "__delitem__": operator.delitem,
}
RULES: dict[object, Rule] = {}  # of torch's functions, as they are met


def rule_for(func: Callable[..., object]) -> Rule:
    """The rule of a function, made on first use."""
    rule = RULES.get(func)
    if rule is None:
        rule = _build_rule(func)
        if is_library_module(getattr(func, "__module__", None) or "torch"):
            RULES[func] = rule  # a user's function would be kept alive
    return rule


def _build_rule(func: Any) -> Rule:
    if isinstance(func, HigherOrderOperator):
        return _HIGHER_ORDER
    if isinstance(func, type):
        return Query(func.__name__, of_size=False)
    if isinstance(func, (OpOverload, OpOverloadPacket)):
        return _operator_rule(func)
    name = func.__name__
    if name in ("__get__", "__set__", "__delete__"):
        return _property_rule(name, func.__self__)
    if name in _REFUSED:
        return _refuse(name)
    if name in _QUERIES:
        return _query(name)
    if name == "__deepcopy__":  # its memo belongs to the run; a graph starts a new one
        return Call("call_function", copy.deepcopy, "deepcopy")
    facts: dict[str, Any] = {
        "writes": _writes(name),
        "sized_by_data": name in SIZED_BY_DATA,
        "takes_sizes": name in _TAKES_SIZES,
        "splits": name in _SPLITS,
        "may_write": _writes(name) or isinstance(func, FunctionType),  # F.relu(inplace=True)
        "may_draw": _may_draw(func, name),
    }
    module = getattr(func, "__module__", None)  # a method of C's has none
    own = getattr(torch.Tensor, name, None), _first_method(name)
    is_method = func in own or module == "torch._tensor"
    if name in _OPERATORS and is_method:
        return Call("call_function", _OPERATORS[name], name, None, **facts)
    if is_method:
        return Call("call_method", name, name, None, **facts)
    facts |= {"writes_also": find_written(func), "opaque": not is_library_module(module or "torch")}
    return Call("call_function", as_target(func), name, None, **facts)


def _may_draw(func: Any, name: str) -> bool:
    """Whether a function of torch's has a dropout or draws inside, although no name tells."""
    if name in RECURRENT:
        return True
    return isinstance(func, FunctionType) and not DRAWING.isdisjoint(func.__code__.co_names)


class Target:
    """A callable under a name that fx can spell.

    fx takes the names of torch's callables for paths that lead to them, which some are not.
    """

    __module__ = "tripwire"

    def __init__(self, call: Callable[..., Any], name: str) -> None:
        self.call = call
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __repr__(self) -> str:
        return self.__name__


def as_target(func: Any) -> Any:
    """The function itself where its name leads to it, else a Target."""
    found: Any = sys.modules.get(getattr(func, "__module__", None) or "torch", torch)
    there = getattr(found, func.__name__, None)
    if there is func or not is_library_module(found.__name__):
        return func
    return (Target if there is None else _Original)(func, func.__name__)


def _query(name: str) -> Query:
    return Query(name, name in _SIZE_QUERIES, name in _STRIDE_QUERIES, name in _GRAD_QUERIES)


def _refuse(name: str) -> Refuse:
    rule = _REFUSED[name]
    return Refuse(rule.slug, f"`{name}`: {rule.reason}")


def _operator_rule(func: OpOverload[Any, Any] | OpOverloadPacket[Any, Any]) -> Call:
    overloads = [func] if isinstance(func, OpOverload) else list_overloads(func)
    name, namespace = func.__name__.partition(".")[0], overloads[0].namespace
    opaque = namespace not in ("aten", "prim", "prims")
    name = f"{namespace}.{name}" if opaque else name  # a custom `deepcopy` is another thing
    return Call(
        "call_function",
        func,
        name,
        writes=_writes(name),
        writes_also=find_written_by(name, overloads),
        sized_by_data=any(torch.Tag.dynamic_output_shape in op.tags for op in overloads),
        opaque=opaque,
    )


def _property_rule(kind: str, descriptor: Any) -> Rule:
    name: str = getattr(descriptor, "fget", descriptor).__name__  # a property, or a C getter
    if name in _REFUSED:
        return _refuse(name)
    if kind == "__get__":
        if name in _QUERIES:
            return _query(name)
        return Call("call_function", GETATTR, name, name)
    if kind == "__set__":
        return Call("call_function", SETATTR, f"set_{name}", name, writes=True)
    return Call("call_function", DELATTR, f"delete_{name}", name, writes=True)


def _writes(name: str) -> bool:
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


_NOT_IN_PLACE = frozenset({"__index__", "__int__", "__invert__", "__iter__", "__init__"})


DROPOUTS = words(
    "dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout"
)
DRAWING = DROPOUTS | words(
    "rand randn randint randperm rand_like randn_like randint_like normal normal_ "
    "uniform_ bernoulli bernoulli_ multinomial poisson random_ exponential_ cauchy_ "
    "log_normal_ geometric_ rrelu gumbel_softmax fractional_max_pool2d"
)
RECURRENT = words("gru lstm rnn_relu rnn_tanh")


@cache
def is_seeded(name: str) -> bool:
    """Whether an operator of this name draws from a generator, by torch's own tags."""
    packet = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    return packet is not None and any(
        torch.Tag.nondeterministic_seeded in getattr(packet, overload).tags
        for overload in packet.overloads()
    )


def find_out_of_place(call: Call) -> Call | None:
    """The call that computes what an in-place one computes, and leaves its argument alone."""
    if call.name == "zero_":
        return Call("call_function", _zero, "zero")
    if call.name == "fill_":
        return Call("call_function", torch.fill, "fill")
    name = call.name
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    known = callable(getattr(torch.Tensor, plain, None)) and name not in _NO_PLAIN_FORM
    if plain == name or call.attribute is not None or not known:
        return None
    if isinstance(call.target, (OpOverload, OpOverloadPacket)):
        return None
    return Call("call_method", plain, plain)


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    """What `zero_` leaves, with its gradient of zero."""
    return torch.fill(tensor, 0)


# Their namesakes without the underscore do something else.
_NO_PLAIN_FORM = words("bernoulli_ resize_ resize_as_ set_ requires_grad_ swapaxes_ rename_")
# These write their result in the dtype of the tensor, and compute it in another.
RESULT_IS_CAST = words(
    "eq_ ne_ lt_ le_ gt_ ge_ equal_ not_equal_ less_ less_equal_ greater_ greater_equal_ "
    "logical_and_ logical_or_ logical_xor_ logical_not_"
)


# --- torch's functions as they were before somebody put others under their names ---
#
# torch tells a mode which function was called by looking up its name. Where a user's function
# stands in for `F.relu` and calls the old one, the old one hands a mode the new one, which would
# then run a second time. And a graph that spells a function by its name would reach whatever is
# there now.

_SPACES: tuple[Any, ...] = (torch.Tensor, torch.nn.functional, torch.functional, torch)
_IN_C: dict[Any, Any] = {torch.Tensor: torch._C.TensorBase, torch: torch._C._VariableFunctions}


def _is_users(value: object) -> bool:
    function = value.fget if type(value) is property else value
    return type(function) is FunctionType and torch_path(function.__code__.co_filename) is None


# As tripwire found them, but for what somebody had put there before.
_FIRST = [(space, {n: v for n, v in vars(space).items() if not _is_users(v)}) for space in _SPACES]
_METHODS = _FIRST[0][1]
_OF_CODE: dict[CodeType, FunctionType] = {}  # functions of torch's that others stand in for


def _first_method(name: str) -> Any:
    return _METHODS.get(name) or getattr(torch._C.TensorBase, name, None)


def _find_caller(frame: FrameType | None) -> FunctionType | None:
    """The function of torch's that handed its own call to a mode, by the frame that told it."""
    if frame is None or frame.f_code is not torch.overrides.handle_torch_function.__code__:
        return None  # C code told it
    code = frame.f_back.f_code  # type: ignore[union-attr]
    if code not in _OF_CODE and torch_path(code.co_filename) is not None:
        for one in gc.get_referrers(code):
            if isinstance(one, FunctionType) and one.__code__ is code:
                _OF_CODE[code] = one
    return _OF_CODE.get(code)


def find_original(func: Any) -> Any:
    """The function that was called, if the mode got another one that has its name."""
    if isinstance(func, FunctionType) and is_own_file(func.__code__.co_filename):
        return func
    accessor = func.__name__ if type(func) is MethodWrapperType else None  # property.__get__
    wanted = func if accessor is None else func.__self__
    # A method of C's and a property lie in Tensor: 2,000 names elsewhere are left out, 77 → 4 µs.
    is_of_tensor = accessor is not None or type(func) is MethodDescriptorType
    for space, first in _FIRST[:1] if is_of_tensor else _FIRST:
        for name, value in tuple(vars(space).items()):
            if value is not wanted:
                continue
            plain = first.get(name) or _find_caller(sys._getframe(2))
            plain = plain or getattr(_IN_C.get(space), name, None)
            if plain is None:
                return func
            return plain if accessor is None else getattr(plain, accessor, func)
    return func


def spell_original(rule: Call, func: Any) -> Call:
    """The rule, but by the function itself where its name leads to another one now."""
    if not _is_replaced(rule, func):
        return rule
    return replace(rule, op="call_function", target=_Original(func, rule.name), attribute=None)


class _Original(Target):
    """One that stands behind another: no mode of a compiler's is told of its call."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_function_stack():
            return self.call(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            return self.call(*args, **kwargs)


def _is_replaced(rule: Call, func: Any) -> bool:
    target = rule.target
    if target is func:
        space = sys.modules.get(getattr(func, "__module__", None) or "torch", torch)
        return getattr(space, func.__name__, func) is not func
    by_operator = isinstance(target, BuiltinFunctionType) and target.__module__ == "_operator"
    if rule.op == "call_method" or by_operator:
        return _is_other_method(rule.name)
    return rule.attribute is not None and _is_other_method(rule.attribute)


def _is_other_method(name: str) -> bool:
    return vars(torch.Tensor).get(name) is not _METHODS.get(name)
