"""The one way to count storages: what autograd keeps counts once, whole and by name; what is alive is found."""

import gc
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from kept import kept
from torch import nn

from tpformer.models import GPT, GPTConfig
from tpformer.planner.counting import SavedBytes
from tpformer.planner.storages import OTHER, RESULT, Saved, live_storages, nbytes, new_objects, storages


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def test_storages_count_once_and_whole():
    toy, x = Toy(), torch.randn(6, 4)
    names = {"first": {0: "input"}, "second": {0: "hidden", RESULT: "output"}, "": {0: "late"}}
    with Saved().recording(toy, names) as saved:
        y = toy(x[:3])
        y = y.exp()
    # x is kept as a view of 3 rows; tanh and the second linear keep one tensor; no weight counts
    assert saved.items() == {"late": 6 * 4 * 4, "hidden": 3 * 8 * 4, OTHER: 3 * 2 * 4}
    assert saved.items(lambda x: f"of {tuple(x.shape)}")["of (3, 2)"] == y.untyped_storage().nbytes()
    assert saved.total() == 96 + 96 + 24
    saved.leave_out([x])
    assert saved.total() == 96 + 24


def test_hooks_are_gone_afterwards_and_what_is_left_out_does_not_count():
    toy = Toy()
    with Saved().recording(toy) as saved:
        pass
    toy(torch.randn(3, 4))
    assert saved.total() == 0 and not any(module._forward_pre_hooks for module in toy.modules())
    x, weight = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    with Saved(weight).recording() as saved:
        y = (x[:2] @ weight).exp()
    assert saved.sizes() == {x.untyped_storage(): 3 * 4 * 4, y.untyped_storage(): 2 * 4 * 4}


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()  # pytest's own imports
    yield
    gc.freeze()


def test_alive_are_views_and_gradients_of_leaves(nothing_frozen):
    def found() -> int:
        gc.collect()
        return sum(storage.nbytes() == 4 * 977 for storage in live_storages(lambda x: not x.is_meta))

    old = torch.zeros(977)
    assert found() == 1
    frozen = gc.get_freeze_count()
    with new_objects():
        x = torch.zeros(977, requires_grad=True)
        view = x.detach()[:5]
        assert found() == 1 and storages([x, view]) == {x.untyped_storage()} and nbytes([x, view, None]) == 3928
        x.sum().backward()
        assert found() == 2
        del x
        assert found() == 1, "the view holds the storage"
    assert found() == 2 and gc.get_freeze_count() == frozen and old.numel() == 977
    others = torch.zeros(977).fill_(1).to_sparse(), torch.eye(3).to_sparse_csr()
    assert found() == 3, "the values of a sparse one, of which others have no storage"
    del others


@pytest.mark.parametrize(("frozen", "seen"), [(375, 0), (100_000, 1)])
def test_only_what_a_program_has_frozen_stays_as_it_is(frozen, seen):
    """Python 3.12.1 says 375 from its start on; a fork server freezes all that it has imported."""
    old = torch.zeros(983)
    with mock.patch.object(gc, "get_freeze_count", return_value=frozen), new_objects():
        assert sum(storage.nbytes() == 4 * 983 for storage in live_storages(lambda x: not x.is_meta)) == seen
    assert old.numel() == 983


def test_a_part_offloads_again_after_it_was_recorded():
    config = GPTConfig(vocab_size=250, seq_length=16, n_layers=4, hidden_size=32, n_heads=4)
    part = kept(GPT, config, offload_activations=True)
    ids, saved = torch.zeros(1, 16, dtype=torch.int64), SavedBytes()
    said = part.keep
    assert said.offload is not None
    with saved.of_part(part):
        part(ids, targets=ids, sample_index=torch.arange(1), step=1)
    assert part.keep is said and saved.units == 4 and saved.totals()[0] > 0
