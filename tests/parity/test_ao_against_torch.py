"""Compares sparsifiers and schedulers with torch's: names, masks, states, levels and repr."""

from __future__ import annotations

import copy
import importlib
import inspect
import io
import itertools

import pytest
import torch
import torch.ao.pruning as theirs
from torch import Tensor, nn

import secateur.drop_in.ao_pruning as ours
from secateur.drop_in.ao_pruning.sparsifier import weight_norm_sparsifier as our_norms

MODULES = [
    "_mappings",
    "sparsifier.utils",
    "sparsifier.base_sparsifier",
    "sparsifier.weight_norm_sparsifier",
    "sparsifier.nearly_diagonal_sparsifier",
    "scheduler.base_scheduler",
    "scheduler.lambda_scheduler",
    "scheduler.cubic_scheduler",
]
LIBRARIES = {"ours": ours, "torch": theirs}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.b = nn.Linear(8, 8, bias=False)
        self.c = nn.Sequential(nn.Linear(8, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(self.a(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def prepared(library, model=None, config=None, sparsifier="WeightNormSparsifier", **settings):
    model = net() if model is None else model
    made = getattr(library, sparsifier)(**settings)
    made.prepare(model, config)
    return model, made


def masks(sparsifier) -> dict[str, Tensor]:
    return {g["tensor_fqn"]: g["module"].parametrizations[g["tensor_name"]][0].mask for g in sparsifier.groups}


def assert_same_masks(mine, other) -> None:
    a, b = masks(mine), masks(other)
    assert list(a) == list(b)
    for name in a:
        assert torch.equal(a[name].bool(), b[name].bool()), name


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# --- names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES)
def test_every_module_has_the_public_names_of_torch(name):
    mine = importlib.import_module(f"secateur.drop_in.ao_pruning.{name}")
    other = importlib.import_module(f"torch.ao.pruning.{name}")
    for public in getattr(other, "__all__", ["NearlyDiagonalSparsifier"]):
        assert hasattr(mine, public)


def test_the_package_has_the_names_of_torch():
    public = {name for name in vars(theirs) if not name.startswith("_") and not inspect.ismodule(getattr(theirs, name))}
    assert public <= set(vars(ours))
    assert public == set(ours.__all__)


def parameters(function) -> list[tuple[str, object, object]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", sorted(ours.__all__))
def test_signatures_and_defaults_are_those_of_torch(name):
    mine, other = getattr(ours, name), getattr(theirs, name)
    assert parameters(mine) == parameters(other)
    for method, function in vars(other).items() if inspect.isclass(other) else ():
        if inspect.isfunction(function) and method not in ("state_dict", "__getstate__", "__setstate__", "__repr__"):
            assert [p[0] for p in parameters(getattr(mine, method))] == [p[0] for p in parameters(function)], method


def test_constants_are_those_of_torch():
    mine = importlib.import_module("secateur.drop_in.ao_pruning.sparsifier.base_sparsifier")
    other = importlib.import_module("torch.ao.pruning.sparsifier.base_sparsifier")
    assert mine.SUPPORTED_MODULES == other.SUPPORTED_MODULES
    assert mine.KEYS_NOT_IN_STATE_DICT == other.KEYS_NOT_IN_STATE_DICT


# --- masks ----------------------------------------------------------------------------------------------------------------


def cube(T: Tensor) -> Tensor:
    return T**3


BLOCKS = [(1, 1), (1, 4), (4, 1), (2, 2), (3, 4), (4, 4)]
LEVELS = [-1.0, 0.0, 0.1, 0.5, 0.77, 0.999, 1.0, 2.0]


@pytest.mark.parametrize("norm", [None, 1, 2, cube], ids=["default", "1", "2", "cube"])
@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_masks_are_those_of_torch(block, norm):
    weight = torch.randn(12, 16, generator=torch.Generator().manual_seed(1))
    for level, zeros in itertools.product(LEVELS, {block[0] * block[1], 1, block[0] * block[1] // 2}):
        found = []
        for library in (ours, theirs):
            layer = nn.Linear(16, 12, bias=False)
            layer.weight.data = weight.clone()
            model, sparsifier = prepared(library, nn.Sequential(layer), None, norm=norm)
            sparsifier.groups[0].update(sparsity_level=level, sparse_block_shape=block, zeros_per_block=zeros)
            sparsifier.step()
            found.append(model[0].weight.detach())
        assert torch.equal(*found), (level, zeros)


@pytest.mark.parametrize("shape", [(5, 6), (7, 3), (1, 9), (9, 1), (33, 65)], ids=str)
@pytest.mark.parametrize("block", [(1, 4), (2, 4), (16, 16)], ids=str)
def test_masks_of_whole_blocks_are_those_of_torch_where_they_do_not_divide(shape, block):
    for level in (0.2, 0.5, 0.9):
        found = []
        for library in (ours, theirs):
            torch.manual_seed(2)
            model, sparsifier = prepared(
                library, nn.Sequential(nn.Linear(shape[1], shape[0])), None, sparsity_level=level, sparse_block_shape=block
            )
            sparsifier.step()
            found.append(model[0].weight.detach())
        assert torch.equal(*found), level


@pytest.mark.parametrize("settings", [{}, {"zeros_per_block": 2}, {"sparse_block_shape": (1, 1)}], ids=str)
def test_masks_stay_those_of_torch_while_weights_and_levels_move(settings):
    (mine, our_sparsifier), (other, their_sparsifier) = (prepared(library, **settings) for library in (ours, theirs))
    g = torch.Generator().manual_seed(3)
    for level in (0.2, 0.5, 0.8, 0.9, 1.0, 0.0, 0.3, 0.6):  # not a falling level in between, which would rank equal zeros
        for sparsifier in (our_sparsifier, their_sparsifier):
            for group in sparsifier.groups:
                group["sparsity_level"] = level
            sparsifier.step()
        assert_same_masks(our_sparsifier, their_sparsifier)
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            noise = torch.randn(a.shape, generator=g)
            a.data += noise
            b.data += noise


def test_a_level_below_one_keeps_a_block_and_a_disabled_sparsifier_does_nothing():
    for library in (ours, theirs):
        model, sparsifier = prepared(
            library, nn.Sequential(nn.Linear(4, 4)), None, sparsity_level=0.99, sparse_block_shape=(4, 4)
        )
        sparsifier.step()
        assert model[0].weight.count_nonzero() == 16
        sparsifier.groups[0]["sparsity_level"] = 1.0
        sparsifier.enable_mask_update = False
        sparsifier.step()
        assert model[0].weight.count_nonzero() == 16


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4)], ids=str)
@pytest.mark.parametrize("nearliness", [-1, 0, 1, 3, 5])
def test_diagonal_bands_are_those_of_torch(shape, nearliness):
    found = []
    for library in (ours, theirs):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(shape[1], shape[0]))
        _, sparsifier = prepared(library, layer, None, "NearlyDiagonalSparsifier", nearliness=nearliness)
        sparsifier.step()
        found.append(layer[0].weight.detach())
    assert torch.equal(*found)


# --- the parts that subclasses call by name -------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(1, 4), (2, 2), (4, 1)], ids=str)
def test_the_helpers_give_the_masks_of_torch(block):
    data = torch.rand(8, 12, generator=torch.Generator().manual_seed(4))
    mine, other = ours.WeightNormSparsifier(), theirs.WeightNormSparsifier()
    for level in (0.0, 0.3, 0.8, 0.99, 1.0):
        found = [s._make_tensor_mask(data, data.shape, level, block) for s in (mine, other)]
        assert torch.equal(*found)
        assert found[0].dtype == found[1].dtype
    for zeros in range(5):
        assert torch.equal(*[s._make_block_mask(data, block, zeros) for s in (mine, other)])
    given = torch.ones(8, 12)
    assert mine._make_tensor_mask(data, data.shape, 0.5, block, mask=given) is given
    assert torch.equal(given, other._make_tensor_mask(data, data.shape, 0.5, block))
    indices = torch.tensor([[[0, 2]] * 4])
    arguments = {"output_shape": (8, 12), "dim": 2, "indices": indices, "block_shape": block, "input_shape": (1, 4, 24)}
    assert torch.equal(*[s._scatter_fold_block_mask(**arguments) for s in (mine, other)])
    assert our_norms._flat_idx_to_2d(17, (3, 5)) == (3, 2)


def test_the_names_of_modules_and_tensors_are_found_as_torch_finds_them():
    model = net()
    for module in [*model.modules(), nn.Linear(1, 1)]:
        assert ours.module_to_fqn(model, module) == theirs.module_to_fqn(model, module)
        assert ours.module_to_fqn(model, module, "x.") == theirs.module_to_fqn(model, module, "x.")
    for path in ("", "a", "a.0", "a.0.weight", "no.such", "a.9"):
        assert ours.fqn_to_module(model, path) is theirs.fqn_to_module(model, path)
    for path in ("a.0.weight", "b.weight", "weight", ".weight", ".b.weight", "no.such.thing"):
        mine, other = (library.get_arg_info_from_tensor_fqn(model, path) for library in (ours, theirs))
        assert list(mine.items()) == list(other.items())


# --- groups, words and states ---------------------------------------------------------------------------------------------


CONFIGS = [None, [{"tensor_fqn": "b.weight", "sparsity_level": 0.25}, {"tensor_fqn": "a.2.bias", "extra": "kept"}]]


@pytest.mark.parametrize("config", CONFIGS, ids=["none", "list"])
def test_groups_repr_and_state_read_as_those_of_torch(config):
    model, mine = prepared(ours, None, config)
    twin, other = prepared(theirs, None, config)
    assert [g["tensor_fqn"] for g in mine.groups] == [g["tensor_fqn"] for g in other.groups]
    for a, b in zip(mine.groups, other.groups, strict=True):
        assert {**a, "module": None} == {**b, "module": None}
        assert a["module"] is model.get_submodule(a["module_fqn"])
    assert repr(mine) == repr(other)
    assert mine.defaults == other.defaults
    assert mine.config == other.config
    a, b = mine.state_dict(), other.state_dict()
    assert a["groups"] == b["groups"]
    assert {name: list(entry) for name, entry in a["state"].items()} == {
        name: list(entry) for name, entry in b["state"].items()
    }
    assert mine.state["b.weight"]["mask"] is model.b.parametrizations.weight[0].mask
    assert list(model.state_dict()) == list(twin.state_dict())


@pytest.mark.parametrize("settings", [{}, {"zeros_per_block": 2}], ids=str)
@pytest.mark.parametrize(("source", "target"), [(ours, theirs), (theirs, ours), (ours, ours)], ids=["out", "in", "own"])
def test_a_state_saved_with_one_is_loaded_with_the_other(source, target, settings):
    model, saver = prepared(source, **settings)
    saver.step()
    wanted, x = copy.deepcopy(masks(saver)), torch.randn(3, 8)
    twin, loader = prepared(target, sparsity_level=0.1)
    loader.load_state_dict(through_a_file(saver.state_dict()))
    twin.load_state_dict(model.state_dict(), strict=False)
    assert all(torch.equal(masks(loader)[name].bool(), mask.bool()) for name, mask in wanted.items())
    assert torch.equal(twin(x), model(x))
    assert [g["sparsity_level"] for g in loader.groups] == [0.5] * 4
    loader.step()
    saver.step()
    assert_same_masks(loader, saver)


def test_a_model_state_goes_both_ways():
    (mine, _), (other, _) = prepared(ours), prepared(theirs)
    other.load_state_dict(mine.state_dict(), strict=False)
    mine.load_state_dict(other.state_dict())


def test_squashing_gives_the_weights_and_the_sparse_params_of_torch():
    found = []
    for library in (ours, theirs):
        model, sparsifier = prepared(library)
        sparsifier.step()
        sparsifier.squash_mask(("sparsity_level",), {"a.0": ("sparse_block_shape", "zeros_per_block")})
        assert not hasattr(model.b, "parametrizations")
        assert type(model.b) is nn.Linear
        found.append((model.state_dict(), model.b.sparse_params, model.a[0].sparse_params, len(sparsifier.groups)))
    (a, *rest), (b, *other) = found
    assert rest == other
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


# --- schedulers -----------------------------------------------------------------------------------------------------------


def tenth(epoch: int) -> float:
    return min(1.0, epoch / 10)


def half(epoch: int) -> float:
    return 0.5**epoch


SCHEDULES = {
    "lambda": ("LambdaSL", {"sl_lambda": tenth}),
    "lambdas": ("LambdaSL", {"sl_lambda": [tenth, half, tenth, half], "last_epoch": 3}),
    "cubic": ("CubicSL", {"init_sl": 0.1, "init_t": 3, "delta_t": 2, "total_t": 5}),
    "cubic from zero": (
        "CubicSL",
        {"init_sl": [0.1, 0.2, 0.7, 0.0], "init_t": 4, "initially_zero": True, "total_t": (1, 2, 3, 4)},
    ),
    "cubic as it is": ("CubicSL", {"last_epoch": 50}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_levels_are_those_of_torch_at_every_step(name, capsys):
    kind, settings = SCHEDULES[name]
    seen = {}
    for key, library in LIBRARIES.items():
        _, sparsifier = prepared(library, sparsity_level=0.6)
        scheduler = getattr(library, kind)(sparsifier, verbose=True, **settings)
        levels = [scheduler.get_last_sl()]
        for epoch in range(25):
            sparsifier.step()
            scheduler.step(*([epoch] if epoch % 2 else []))
            levels.append(scheduler.get_last_sl())
            assert levels[-1] == [g["sparsity_level"] for g in sparsifier.groups]
        seen[key] = levels, scheduler.state_dict(), repr(scheduler), capsys.readouterr().out, sparsifier._step_count
    assert seen["ours"] == seen["torch"]
    assert seen["ours"][3].startswith("Adjusting sparsity level of group 0 to ")


@pytest.mark.parametrize("name", ["lambda", "cubic"])
@pytest.mark.parametrize(("source", "target"), [(ours, theirs), (theirs, ours), (ours, ours)], ids=["out", "in", "own"])
def test_a_schedule_saved_with_one_goes_on_with_the_other(source, target, name):
    kind, settings = SCHEDULES[name]
    _, sparsifier = prepared(source, sparsity_level=0.6)
    saver = getattr(source, kind)(sparsifier, **settings)
    for _ in range(5):
        sparsifier.step()
        saver.step()
    _, resumed = prepared(target, sparsity_level=0.6)
    loader = getattr(target, kind)(resumed, **settings)
    resumed.load_state_dict(through_a_file(sparsifier.state_dict()))
    loader.load_state_dict(through_a_file(saver.state_dict()))
    for _ in range(5):
        for one, schedule in ((sparsifier, saver), (resumed, loader)):
            one.step()
            schedule.step()
        assert loader.get_last_sl() == saver.get_last_sl()
    assert loader.base_sl == [0.6] * 4


def test_the_cubic_function_is_that_of_torch():
    for t, zero in itertools.product(range(12), (False, True)):
        for s_0, s_f in ((0.1, 0.5), (0.0, 1.0), (0.9, 0.2)):
            arguments = {"s_0": s_0, "s_f": s_f, "t": t, "t_0": 2, "dt": 1, "n": 4, "initially_zero": zero}
            assert ours.CubicSL.sparsity_compute_fn(**arguments) == theirs.CubicSL.sparsity_compute_fn(**arguments)


# --- conversion -----------------------------------------------------------------------------------------------------------


class Marked(nn.Linear):
    @classmethod
    def from_dense(cls, dense: nn.Linear) -> Marked:
        new = cls(dense.in_features, dense.out_features, dense.bias is not None)
        new.weight.data = dense.weight.detach().clone()
        return new


@pytest.mark.parametrize("library", [ours, theirs], ids=LIBRARIES)
@pytest.mark.parametrize("inplace", [False, True])
def test_convert_swaps_what_has_a_mask_and_keeps_hooks(library, inplace):
    model, sparsifier = prepared(library, None, [{"tensor_fqn": "b.weight"}, {"tensor_fqn": "a.0.weight"}])
    sparsifier.step()
    calls = []
    model.b.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.b.register_forward_hook(lambda *_: calls.append("after"))
    new = sparsifier.convert(model, {nn.Linear: Marked}, inplace=inplace)
    assert (new is model) is inplace
    assert [type(m) for m in (new.b, new.a[0], new.a[2], new.c[0])] == [Marked, Marked, nn.Linear, nn.Linear]
    assert (new.b.weight == 0).float().mean() == 0.5
    new(torch.randn(2, 8))
    assert calls == ["before", "after"]
    assert inplace or type(model.b).__name__ == "ParametrizedLinear"


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_the_quantized_mappings_are_those_of_torch(kind):
    name = f"get_{kind}_sparse_quantized_mapping"
    assert getattr(ours, name)() == getattr(theirs, name)()
