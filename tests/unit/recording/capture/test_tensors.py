"""Tensors come back with their bytes, their strides and what they share."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import safetensors.torch
import torch
from roundtrip import again, data_of, encode, seen, write
from torch import nn

import tripwire
from tripwire.errors import BadOption, CannotReplay
from tripwire.recording.capture.origin import Policy
from tripwire.recording.capture.tensors import measure
from tripwire.recording.format import nodes
from tripwire.recording.format.file import TENSORS, Record
from tripwire.recording.format.torchvalues import imitate
from tripwire.recording.format.views import ObjectView, WithheldView

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32,
    torch.int64, torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
]  # fmt: skip


def raw(dtype: torch.dtype, count: int) -> torch.Tensor:
    size = dtype.itemsize * count
    source = torch.arange(size, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    return source.view(dtype) if dtype != torch.bool else source.to(dtype)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.untyped_storage())


def elements(tensor: torch.Tensor) -> list[bytes]:
    """The bytes of each element, in order: not every dtype can be compared, or copied."""
    data, size = bits(tensor), tensor.dtype.itemsize
    count = tensor.untyped_storage().nbytes() // size
    places = torch.arange(count).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return [data[place * size : (place + 1) * size] for place in places.flatten().tolist()]


def same_form(left: torch.Tensor, right: torch.Tensor) -> bool:
    forms = [
        (
            type(t), t.dtype, t.shape, t.stride(), t.requires_grad, t.is_leaf, t.is_conj(),
            t.is_neg(), t.is_inference(), t.device,
        )
        for t in (left, right)
    ]  # fmt: skip
    return forms[0] == forms[1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["whole", "view", "zero-dim"])
def test_every_dtype_comes_back_bit_by_bit(tmp_path, dtype, form) -> None:
    whole = raw(dtype, 12)
    value = {"whole": whole, "view": whole[3:9:2], "zero-dim": whole[5]}[form]
    for found in (again(tmp_path, value), seen(tmp_path, value)):
        assert same_form(found, value)
        assert elements(found) == elements(value)


def test_every_dtype_that_safetensors_knows_has_its_name_in_the_header(tmp_path) -> None:
    value = [raw(dtype, 4) for dtype in DTYPES]
    with Record.of(data_of(tmp_path, value)) as record:
        member = record.read(TENSORS)
        table = record.table
    items = table.nodes[table.roots["value"][0]].items
    names = [str(table.nodes[n].blob) for (n,) in items]
    loaded = safetensors.torch.load(member)
    named = [t for name, t in zip(names, value, strict=True) if loaded[name].dtype == t.dtype]
    assert len(named) >= 15
    for name, tensor in zip(names, value, strict=True):
        assert bits(loaded[name]) == bits(tensor)


SHAPES = {
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.randn(3, 4).t(),
    "permuted": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "expanded": lambda: torch.randn(3, 1).expand(3, 5),
    "overlapping": lambda: torch.arange(9.0).as_strided((3, 4), (2, 1)),
    "stepped": lambda: torch.arange(20)[3:17:4],
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "odd stride of a size of one": lambda: torch.randn(6).as_strided((1, 3), (77, 2)),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "leaf": lambda: torch.randn(3, requires_grad=True),
    "result": lambda: torch.randn(3, requires_grad=True) * 2,
    "parameter": lambda: nn.Parameter(torch.randn(3)),
    "frozen parameter": lambda: nn.Parameter(torch.randn(3), requires_grad=False),
    "view of a parameter": lambda: nn.Parameter(torch.randn(3, 4))[1],
    "meta": lambda: torch.empty(3, 4, device="meta").t(),
    "zero-dim": lambda: torch.tensor(3.5),
    "empty view at an offset": lambda: torch.arange(10)[5:5],
}


@pytest.mark.parametrize("name", SHAPES)
def test_every_form_comes_back(tmp_path, name) -> None:
    value = SHAPES[name]()
    found = again(tmp_path, value)
    assert same_form(found, value)
    if name != "meta":
        assert torch.equal(found, value)


def test_an_inference_tensor_comes_back_as_one(tmp_path) -> None:
    with torch.inference_mode():
        value = torch.ones(3)
    found = again(tmp_path, value)
    assert found.is_inference() and torch.equal(found, value)


def test_a_result_of_an_operation_can_be_changed_in_place_again(tmp_path) -> None:
    value = torch.randn(3, requires_grad=True) * 2
    found = again(tmp_path, {"x": value, "same": value.detach()})
    found["x"].add_(1)
    found["x"].sum().backward()
    assert torch.equal(found["same"], found["x"].detach())


def test_what_shared_memory_shares_it_again(tmp_path) -> None:
    base = torch.arange(12.0)
    value = [base, base[2:6], base.view(3, 4).t(), base.view(torch.int32), torch.arange(12.0)]
    found = again(tmp_path, value)
    found[0][3] = 100
    assert found[1][1] == 100 and found[2][3, 0] == 100
    assert torch.equal(found[3], found[0].view(torch.int32))
    assert found[4][3] == 3
    assert [t.storage_offset() for t in found] == [t.storage_offset() for t in value]


def test_tied_weights_are_tied_again(tmp_path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(3, 3)
            self.b = nn.Linear(3, 3)
            self.b.weight = self.a.weight
            self.register_buffer("steps", torch.zeros(()))
            self.extra = [self.a]

    globals()["Tied"] = Tied
    Tied.__qualname__ = "Tied"
    model = Tied()
    found = again(tmp_path, model)
    assert found.b.weight is found.a.weight and found.extra[0] is found.a
    assert list(found.state_dict()) == list(model.state_dict())
    assert list(vars(found)) == list(vars(model))
    x = torch.randn(2, 3)
    assert torch.equal(found.b(found.a(x)), model.b(model.a(x)))
    view = seen(tmp_path, model)
    assert isinstance(view, ObjectView)
    assert list(view.attributes["_modules"]) == ["a", "b"]


def test_a_modules_own_table_may_be_held_elsewhere(tmp_path) -> None:
    model = nn.Linear(2, 2)
    found = again(tmp_path, [model._parameters, model])
    assert found[1]._parameters is found[0]
    assert found[0]["weight"] is found[1].weight


def test_hooks_and_modes_of_a_module_are_kept(tmp_path) -> None:
    model = nn.Dropout().eval()
    model.register_forward_hook(hook)
    found = again(tmp_path, model)
    assert not found.training
    assert list(found._forward_hooks.values()) == [hook]


def hook(*args: object) -> None: ...


class Marked(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("ran")


class Special(nn.Parameter):
    pass


def test_subclasses_gradients_and_attributes_come_back(tmp_path) -> None:
    leaf = torch.ones(3, requires_grad=True)
    leaf.grad = torch.full((3,), 2.0)
    leaf.tag = [leaf]
    marked = torch.ones(2).as_subclass(Marked)
    marked.__dict__["note"] = "n"
    special = Special(torch.ones(2))
    found = again(tmp_path, [leaf, marked, special, leaf.grad])
    assert torch.equal(found[0].grad, leaf.grad) and found[0].tag[0] is found[0]
    assert type(found[1]) is Marked and found[1].__dict__ == {"note": "n"}
    assert type(found[2]) is Special and found[2].requires_grad
    assert found[3] is found[0].grad


def test_nothing_of_a_mode_sees_the_encoding(tmp_path) -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    seen_calls: list[object] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen_calls.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen_calls.append(func)
            return func(*args, **(kwargs or {}))

    value = [torch.ones(3), nn.Linear(2, 2), torch.ones(3, dtype=torch.complex64).conj()]
    with Functions(), Dispatch():
        record, _ = encode(value)
        record.write(tmp_path / "x.rec")
    assert seen_calls == []


@pytest.mark.filterwarnings("ignore")
def test_what_has_no_plain_bytes_is_refused_with_a_reason(tmp_path) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(3)
    caught: list[object] = []
    torch.func.vmap(lambda x: caught.append(x) or x)(torch.ones(2, 3))
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    freed = torch.ones(1000)
    freed.untyped_storage().resize_(0)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    values = {
        "fake": fake,
        "sparse": torch.eye(3).to_sparse(),
        "quantised": quantised,
        "nested": nested,
        "vmap": caught[0],
        "freed": freed,
    }
    _, encoder = encode(values)
    left_out = {omission.what: omission.why for omission in encoder.left_out}
    assert set(left_out) == {f"value[{name!r}]" for name in values}
    assert "quantised" in left_out["value['quantised']"]
    assert "torch.func" in left_out["value['vmap']"]


def test_torchs_small_values_come_back(tmp_path) -> None:
    value = [
        torch.float32, torch.device("cuda", 1), torch.strided, torch.channels_last,
        torch.Size([1, 2]), torch.Size([]), torch.complex128,
    ]  # fmt: skip
    assert again(tmp_path, value) == value
    assert type(again(tmp_path, value)[4]) is torch.Size


def test_a_generator_goes_on_where_it_was(tmp_path) -> None:
    source = torch.Generator().manual_seed(7)
    torch.rand(3, generator=source)
    found = again(tmp_path, source)
    assert torch.equal(torch.rand(3, generator=found), torch.rand(3, generator=source))


def test_results_of_torch_with_names_come_back(tmp_path) -> None:
    value = torch.max(torch.randn(3, 4), dim=1)
    found = again(tmp_path, value)
    assert type(found) is type(value) and torch.equal(found.values, value.values)


def test_a_tensor_of_an_absent_device_comes_back_on_the_cpu(tmp_path) -> None:
    record, _ = encode(torch.arange(3.0))
    node = nodes.TensorView(0, (3,), device="cuda:7")
    changed = type(record)(
        record.manifest, nodes.Table({"value": (0,)}, (node,)), record.blobs, record.files
    )
    from roundtrip import ByName

    from tripwire.recording.replay.rerun import rebuild

    with Record.open(changed.write(tmp_path / "x.rec")) as opened:
        found = rebuild(opened.table, opened.blobs, ByName())["value"]
    assert torch.equal(found, torch.arange(3.0)) and found.device.type == "cpu"


# --- size ---


def overhead(path, value: object, unique: int) -> int:
    file = write(path, value)
    size = os.path.getsize(file)
    file.unlink()
    return size - unique


@pytest.mark.parametrize("count", [1, 20, 64, 65, 200, 1000])
def test_a_record_is_hardly_larger_than_its_tensors(tmp_path, count) -> None:
    tensors = [torch.randn(16 + i % 7, 33) for i in range(count)]
    unique = sum(t.nbytes for t in tensors)
    assert overhead(tmp_path, tensors, unique) <= 64 * count + 8192
    params = [nn.Parameter(t) for t in tensors]
    assert overhead(tmp_path, {f"layer.{i}": p for i, p in enumerate(params)}, unique) <= (
        64 * count + 8192 + 12 * count  # the keys are the user's
    )


def test_a_model_is_hardly_larger_than_its_parameters(tmp_path) -> None:
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(50)]
    model = nn.Sequential(*blocks)
    unique = sum(p.nbytes for p in model.parameters())
    assert overhead(tmp_path, model, unique) <= 64 * 200 + 8192


def test_a_model_of_convolutions_is_hardly_larger_than_its_parameters(tmp_path) -> None:
    parts = [nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(60)]
    model = nn.Sequential(*parts)
    unique = sum(t.nbytes for t in model.state_dict().values())
    assert overhead(tmp_path, model, unique) <= 64 * 420 + 8192
    assert again(tmp_path, model)[0][0].kernel_size == (3, 3)


def test_only_the_bytes_in_use_are_kept(tmp_path) -> None:
    big = torch.arange(1_000_000.0)
    assert overhead(tmp_path, [big[500_000:500_010]], 40) < 4096
    assert overhead(tmp_path, [big[10:20], big[100:200]], 4 * 190) < 4096
    found = again(tmp_path, big[500_001:500_010])
    assert torch.equal(found, big[500_001:500_010])


# --- arrays ---


@pytest.mark.parametrize(
    "dtype",
    ["?", "i1", "u2", ">i4", "f2", "f8", "c16", "S3", "U4", "M8[ns]", "m8[D]"],
)
def test_arrays_of_plain_dtypes_come_back(tmp_path, dtype) -> None:
    array = np.arange(6).astype(dtype).reshape(2, 3)
    for value in (array, np.asfortranarray(array), array[:, ::2], array[0, 0], array[:0]):
        found = again(tmp_path, value)
        assert type(found) is type(value)
        assert found.dtype == value.dtype and np.array_equal(found, value)
    fortran = again(tmp_path, np.asfortranarray(array))
    assert fortran.flags.f_contiguous and fortran.flags.writeable


# --- policies ---


def test_a_policy_by_path_keeps_only_what_it_says(tmp_path) -> None:
    torch.manual_seed(0)
    value = {"a": torch.randn(1000), "b": torch.ones(3), "c": torch.ones(4), "d": torch.ones(5)}
    policy = Policy(
        {
            "value['a']": "statistics",
            "*['b']": "shape",
            "value[[]'c']": "full",
            "*['c']": "redacted",
        }
    )
    record, encoder = encode(value, policy)
    assert sorted(o.what for o in encoder.left_out) == ["value['a']", "value['b']", "value['c']"]
    found = seen(tmp_path, value, policy)
    assert isinstance(found["a"], WithheldView) and found["a"].policy == "statistics"
    assert torch.equal(found["d"], value["d"])
    del value["c"]
    live = again(tmp_path, value, policy)
    assert torch.equal(live["b"], torch.zeros(3))
    a, b = measure(live["a"]), measure(value["a"])
    assert a == pytest.approx(b, rel=1e-4, abs=1e-5)
    assert torch.equal(live["a"], again(tmp_path, value, policy)["a"])


def test_a_redacted_tensor_cannot_be_replayed(tmp_path) -> None:
    with pytest.raises(CannotReplay) as raised:
        again(tmp_path, torch.ones(3), Policy("redacted"))
    assert raised.value.slug == "replay-redacted"


def test_what_may_not_be_shown_is_shown_by_no_alias(tmp_path) -> None:
    secret = torch.full((100,), 12345.678, requires_grad=True)
    secret.grad = torch.full((100,), 87654.321)
    value = {
        "secret": secret,
        "view": secret.detach()[5:],
        "array": secret.detach().numpy()[3:],
        "public": torch.ones(3),
    }
    policy = Policy({"value['secret']": "redacted"})
    data = data_of(tmp_path, value, policy)
    for leak in (secret.detach(), secret.grad):
        assert bytes(leak[:2].clone().untyped_storage()) not in data
    assert bytes(torch.ones(3).untyped_storage()) in data


def test_a_policy_may_be_a_function(tmp_path) -> None:
    policy = Policy(lambda path, tensor: "shape" if tensor.numel() > 5 else "full")
    found = again(tmp_path, [torch.ones(3), torch.ones(9)], policy)
    assert torch.equal(found[0], torch.ones(3)) and torch.equal(found[1], torch.zeros(9))


def test_the_cap_leaves_out_the_largest_first(tmp_path) -> None:
    value = [torch.ones(10), torch.ones(1000), torch.ones(20)]
    record, encoder = encode(value, Policy(cap=200))
    assert [o.what for o in encoder.left_out] == ["value[1]"]
    assert "cap of 200" in encoder.left_out[0].why
    assert sum(blob.size for blob in record.blobs) == 120


def test_a_policy_that_means_nothing_is_refused() -> None:
    for wrong in ("all", {"*": "none"}):
        with pytest.raises(BadOption):
            Policy(wrong)


@pytest.mark.parametrize(
    "values",
    [
        torch.randn(1000),
        torch.rand(50) * 100 - 20,
        torch.tensor([0.0] * 99 + [1.0]),
        torch.tensor([1.0, 2.0]),
        torch.tensor([3.0]),
        torch.tensor([1.0, 5.0, 5.0]),
        torch.cat([torch.randn(10), torch.tensor([float("nan"), float("inf"), -float("inf")])]),
        torch.full((4,), float("nan")),
        torch.zeros(7),
    ],
    ids=range(9),
)
def test_imitated_values_have_the_statistics_of_the_real_ones(values) -> None:
    wanted = measure(values)
    assert wanted is not None
    made = measure(imitate(values.numel(), wanted))
    assert made == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_statistics_of_every_dtype_can_be_imitated(tmp_path) -> None:
    for dtype in DTYPES:
        if dtype in (torch.float4_e2m1fn_x2,):
            continue
        found = again(tmp_path, raw(dtype, 8), Policy("statistics"))
        assert found.dtype == dtype and found.shape == (8,)


def test_a_header_is_plain_json(tmp_path) -> None:
    with Record.of(data_of(tmp_path, [torch.ones(2, 3)])) as record:
        member = record.read(TENSORS)
    length = int.from_bytes(member[:8], "little")
    header = json.loads(member[8 : 8 + length])
    assert header == {"0": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}


def test_hooks_of_tensors_are_told_as_left_out(tmp_path) -> None:
    hooked, late, plain = (nn.Parameter(torch.ones(2)) for _ in range(3))
    hooked.register_hook(print)
    late.register_post_accumulate_grad_hook(print)
    path = tripwire.record_call(tmp_path, check=False)(torch.stack, [hooked, late, plain])
    left = tripwire.load_record(path).manifest.omissions
    assert [one.what for one in left if "hooks" in one.why] == ["args[0][0]", "args[0][1]"]
