"""Sparse tensors: their form is guarded; how many elements they have is a value."""

from __future__ import annotations

import pytest
import torch
from unit.dispatch.sidebyside import BACKENDS, check_twins

import tripwire

_WORLD = """
two = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.tensor([1.0, 2.0]), (2, 2))
merged = two.coalesce()
three = torch.sparse_coo_tensor(
    torch.tensor([[0, 0, 1], [1, 1, 0]]), torch.tensor([1.0, 2.0, 3.0]), (2, 2)
)
hybrid = torch.eye(2).to_sparse(1)
eye = torch.eye(2).to_sparse()
none = torch.zeros(2, 2).to_sparse()
full = torch.ones(2, 2).to_sparse()
rows = torch.eye(2).to_sparse_csr()
full_rows = torch.ones(2, 2).to_sparse_csr()
no_rows = torch.zeros(2, 2).to_sparse_csr()
s = two
"""
READS = {
    "identity": "s.coalesce() is s",
    "coalesced": "s.is_coalesced()",
    "by getattr": "getattr(s, 'is_' + 'coalesced')()",
    "of a result": "(s * 2).is_coalesced(), (s * 2).coalesce() is s",
    "beside others": "torch.sparse.mm(s, T().diag()), s.to_dense(), s._nnz(), s.is_coalesced()",
    "dimensions": "s.sparse_dim(), s.dense_dim(), s._values().ndim",
    "values": "s._values().tolist()",
    "indices": "s._indices().tolist()",
    "each value": "[one.item() for one in s.coalesce().values()]",
    "length": "len(s._values())",
    "sizes": "s._indices().shape, s._values().numel(), s._values().size(0) * 2",
    "sizes of a result": "(s + s)._values().shape[0], s.coalesce().values().shape",
    "count": "torch.zeros(s._nnz())",
    "text": "str(s)",
}
ORDERS = {
    "others": ["two", "two", "merged", "two", "three", "hybrid", "eye", "none", "full", "two"],
    "hybrid": ["hybrid", "hybrid", "eye", "eye", "hybrid"],
    "added": ["two", "two", "two.add_(three)", "two.copy_(three)", "two"],
    "merged": ["merged", "merged", "merged.add_(full)", "merged.zero_()", "merged"],
    "marked": ["two", "two", "two._coalesced_(True)", "two"],
}
ROWS = {
    "values": "s.values().tolist()",
    "sizes": "s.values().shape, len(s.col_indices())",
    "indices": "s.col_indices().tolist()",
    "count": "s._nnz()",
    "product": "s @ torch.ones(2)",
}


def _check(read: str, order: list[str], passed: bool, backend: str, folder, hits: int = 1) -> None:
    check_twins(
        _WORLD
        + f"""
def call({"s" if passed else "x"}):
    return {read}

def go(f, see):
    global s
    for step in {order!r}:
        if "." in step:
            exec(step)
        else:
            s = globals()[step]
        try:
            see(f({"s" if passed else "T()"}))
        except RuntimeError as error:
            see(str(error))
""",
        backend,
        folder,
        hits=hits,
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("passed", [True, False], ids=["argument", "global"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", READS)
def test_what_is_read_of_a_sparse_tensor_is_this_calls(
    name, order, passed, backend, tmp_path
) -> None:
    raises = name == "each value" and order == "hybrid"
    _check(READS[name], ORDERS[order], passed, backend, tmp_path, hits=0 if raises else 1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("passed", [True, False], ids=["argument", "global"])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_read_of_rows_that_are_compressed_is_this_calls(
    name, passed, backend, tmp_path
) -> None:
    order = ["rows", "rows", "full_rows", "full_rows", "no_rows", "rows"]
    _check(ROWS[name], order, passed, backend, tmp_path)


LISTS = {
    "mask": "x[x > 0].tolist()",
    "rows of a mask": "torch.stack([x, x], 1)[x > 0].tolist()",
    "nonzero": "x.nonzero().tolist()",
    "unique": "torch.unique(x).tolist()",
    "sum of a mask": "sum(x[x > 0].tolist()) + 1",
    "masked_select": "x.masked_select(x > 0).mul(2).tolist()",
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", LISTS)
def test_a_list_out_of_a_tensor_has_as_many_items_as_the_tensor(name, backend, tmp_path) -> None:
    check_twins(
        f"""
def call(x):
    return {LISTS[name]}

def go(f, see):
    for values in ([1, 2, -1], [1, 2, -1], [3, 4, -1], [1, 1, 1], [-1, -1, -1], [1, 2, 3]):
        see(f(torch.tensor(values, dtype=torch.float32)))
""",
        backend,
        tmp_path,
        hits=1,
    )


def test_elements_that_nobody_counts_may_be_many_or_few() -> None:

    compiled = tripwire.compile(lambda s: torch.sparse.mm(s, torch.ones(2, 2)), backend="eager")
    for dense in (torch.eye(2), torch.ones(2, 2), torch.zeros(2, 2), torch.eye(2)):
        assert torch.equal(compiled(dense.to_sparse()), dense @ torch.ones(2, 2))
    assert tripwire.statistics(compiled).traces == 1
