"""Which tensors are pruned, and the reason for each that is not."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as torch_prune

import secateur as sc


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.encoder = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.LayerNorm(6))
        self.conv = nn.Conv2d(2, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.up = nn.ConvTranspose1d(2, 3, 3)
        self.head = nn.Linear(6, 2)


def names(*args, **kwargs):
    return [target.name for target in sc.targets(*args, **kwargs)[0]]


ALL = ["encoder.0.weight", "encoder.2.weight", "conv.weight", "up.weight", "head.weight"]


def test_linear_and_convolution_weights_are_the_default():
    assert names(Model()) == ALL


@pytest.mark.parametrize("layer", [nn.Linear(2, 3), nn.Conv1d(2, 3, 1), nn.Conv2d(2, 3, 1), nn.Conv3d(2, 3, 1)])
def test_a_layer_alone_is_a_model(layer):
    assert names(layer) == ["weight"]


@pytest.mark.parametrize("kind", [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d])
def test_transposed_convolutions_are_targets(kind):
    assert names(nn.Sequential(kind(2, 3, 1))) == ["0.weight"]


@pytest.mark.parametrize(
    ("include", "found"),
    [
        ("encoder.*", ["encoder.0.weight", "encoder.2.weight"]),
        ("head", ["head.weight"]),
        ("head.weight", ["head.weight"]),
        (["head", "conv"], ["conv.weight", "head.weight"]),
        ("*.weight", ALL),
        ("embed", ["embed.weight"]),
        ("embed.weight", ["embed.weight"]),
        ("head.bias", ["head.bias"]),
        (iter(["up"]), ["up.weight"]),
    ],
)
def test_include_names_parameters_and_modules(include, found):
    assert names(Model(), include=include) == found


@pytest.mark.parametrize(
    ("exclude", "found"),
    [
        ("head", ALL[:-1]),
        ("encoder", ALL[2:]),
        ("encoder.*", ALL[2:]),
        ("*.0.weight", ALL[1:]),
        (["head", "up.weight"], ALL[:3]),
        ("embed", ALL),
    ],
)
def test_exclude_names_parameters_modules_and_what_is_under_them(exclude, found):
    assert names(Model(), exclude=exclude) == found


def test_exclude_wins_over_include():
    assert names(Model(), include="encoder.*", exclude="encoder.0") == ["encoder.2.weight"]


def test_types_choose_layer_types():
    assert names(Model(), types=[nn.Conv2d]) == ["conv.weight"]
    assert names(Model(), types=[nn.Embedding, nn.Linear]) == ["embed.weight", *ALL[:2], "head.weight"]


def test_a_subclass_counts_as_its_type():
    class Mine(nn.Linear):
        pass

    assert names(Mine(2, 2)) == ["weight"]


def test_every_other_parameter_is_skipped_with_a_reason():
    model = Model()
    found, skipped = sc.targets(model, exclude="head")
    assert {t.name for t in found} | set(skipped) == {name for name, _ in model.named_parameters()}
    assert skipped["head.weight"] == "excluded"
    assert "Embedding" in skipped["embed.weight"]
    assert "vector" in skipped["conv.bias"]
    assert sc.plan(model, sparsity=0.5, exclude="head").skipped == skipped


def test_frozen_parameters_are_pruned_like_any_other():
    model = Model().requires_grad_(False)
    plan = sc.prune_(model, sparsity=0.5)
    assert list(plan.masks) == ALL
    assert int((model.head.weight == 0).sum()) == 6
    assert not model.head.weight.requires_grad


def test_tied_weights_are_one_target_under_their_first_name():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    (target,), _ = sc.targets(model)
    assert target.name == "0.weight"
    assert target.slot.also == ("1.weight",)
    sc.prune_(model, sparsity=0.5)
    assert int((model[1].weight == 0).sum()) == 8
    assert model[0].weight is model[1].weight


def test_either_name_of_a_tied_weight_excludes_it():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[1].weight = model[0].weight
    assert names(model, exclude="1.weight") == ["2.weight"]
    assert names(model, include="1") == ["0.weight"]


def test_either_name_of_a_module_that_occurs_twice_is_understood():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "c": nn.Linear(4, 4)})
    model["b"] = model["a"]
    assert names(model) == ["a.weight", "c.weight"]
    assert names(model, exclude="b") == ["c.weight"]
    assert names(model, include="b.weight") == ["a.weight"]


def test_a_head_tied_to_an_embedding_is_pruned_only_when_asked():
    model = Model()
    model.out = nn.Linear(6, 10, bias=False)
    model.out.weight = model.embed.weight
    assert "embed.weight" not in names(model)
    assert names(model, include="out") == ["embed.weight"]


@pytest.mark.parametrize("which", ["include", "exclude"])
def test_a_glob_that_matches_nothing_is_an_error_that_suggests(which):
    with pytest.raises(ValueError, match=rf"{which}='haed'.*Did you mean 'head"):
        sc.targets(Model(), **{which: "haed"})


def test_nothing_left_to_prune_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="nothing to prune"):
        sc.targets(nn.ReLU())
    with pytest.raises(ValueError, match=r"no tensor of Linear is left.*excluded"):
        sc.targets(nn.Linear(2, 2), exclude="*")
    with pytest.raises(ValueError, match="BatchNorm2d is not among the types"):
        sc.targets(nn.BatchNorm2d(3))


def test_a_parametrized_weight_is_skipped_with_the_reason():
    model = nn.Sequential(nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    found, skipped = sc.targets(model)
    assert [t.name for t in found] == ["0.weight", "2.weight"]
    assert "parametrized" in skipped["1.parametrizations.weight.original1"]


@pytest.mark.parametrize("reparametrize", [nn.utils.spectral_norm, lambda m: torch_prune.l1_unstructured(m, "weight", 0.5)])
def test_a_weight_computed_by_a_hook_is_skipped_with_the_reason(reparametrize):
    model = nn.Sequential(nn.Linear(4, 4), reparametrize(nn.Linear(4, 4)))
    found, skipped = sc.targets(model)
    assert [t.name for t in found] == ["0.weight"]
    assert "hook" in skipped["1.weight_orig"]


def test_a_parameter_whose_name_only_looks_computed_is_a_target():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.W_q, self.W_k, self.W_v, self.W_g = (nn.Parameter(torch.randn(4, 4)) for _ in range(4))

    assert names(Attention(), include=["W_q", "W_k", "W_v", "W_g"]) == ["W_q", "W_k", "W_v", "W_g"]
    assert names(Attention(), types=[Attention]) == ["W_q", "W_k", "W_v", "W_g"]


def test_integer_and_complex_parameters_are_skipped_with_their_dtype():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.int8), requires_grad=False)
    model[2].weight = nn.Parameter(torch.ones(4, 4, dtype=torch.complex64))
    found, skipped = sc.targets(model)
    assert [t.name for t in found] == ["0.weight"]
    assert "torch.int8" in skipped["1.weight"]
    assert "torch.complex64" in skipped["2.weight"]


def test_meta_tensors_are_skipped_and_a_model_of_them_is_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    found, skipped = sc.targets(model)
    assert [t.name for t in found] == ["0.weight"]
    assert "meta" in skipped["1.weight"]
    with pytest.raises(ValueError, match=r"meta device.*load its weights first"):
        sc.targets(nn.Linear(4, 4, device="meta"))


def test_a_lazy_layer_is_skipped_because_it_has_no_values_yet():
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    found, skipped = sc.targets(model)
    assert [t.name for t in found] == ["0.weight"]
    assert "no values yet" in skipped["1.weight"]


def test_an_empty_tensor_is_skipped():
    with pytest.warns(UserWarning, match="zero-element"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(0, 4))
    assert sc.targets(model)[1]["1.weight"] == "empty"


@pytest.mark.parametrize("kwargs", [{"types": nn.Linear}, {"types": ["Linear"]}, {"include": 7}, {"exclude": 5}])
def test_a_wrong_choice_says_which_argument_it_was(kwargs):
    (name,) = kwargs
    with pytest.raises(TypeError, match=name):
        sc.targets(Model(), **kwargs)


def test_a_value_that_is_not_a_model_is_refused():
    with pytest.raises(TypeError, match=r"Module"):
        sc.plan("model", sparsity=0.5)


def test_elements_that_share_memory_are_left_alone_with_the_reason():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.randn(1, 4).expand(4, 4))
    plan = sc.prune_(model, sparsity=0.5)
    assert list(plan.masks) == ["0.weight"]
    assert "share memory" in plan.skipped["1.weight"]


@pytest.mark.parametrize("head_first", [False, True])
def test_a_weight_tied_to_an_embedding_is_left_alone_whatever_the_order(head_first):
    model = nn.Module()
    parts = {"emb": nn.Embedding(10, 4), "head": nn.Linear(4, 10, bias=False), "other": nn.Linear(4, 4, bias=False)}
    for name in ("head", "emb", "other") if head_first else ("emb", "head", "other"):
        model.add_module(name, parts[name])
    model.head.weight = model.emb.weight
    found, skipped = sc.targets(model)
    assert [target.name for target in found] == ["other.weight"]
    assert {"emb.weight", "head.weight"} == skipped.keys()


def test_what_cannot_be_ranked_is_left_alone_with_its_dtype():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = nn.Parameter(model[1].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    assert "float8" in sc.plan(model, sparsity=0.5).skipped["1.weight"]


def test_no_include_is_like_none_given():
    assert names(Model(), include=None, exclude=None) == names(Model())


@pytest.mark.parametrize("glob", ["0.weight", "0", "0.*", "_orig_mod.0.weight", "_orig_mod.0"])
def test_globs_match_the_names_of_a_compiled_model_with_and_without_the_wrapper(glob):
    plain = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model = torch.compile(plain, backend="eager")
    assert list(sc.plan(model, sparsity=0.5, include=glob).masks) == ["_orig_mod.0.weight"]
    assert list(sc.plan(model, sparsity=0.5, exclude=glob).masks) == ["_orig_mod.1.weight"]


def test_names_of_a_spread_and_of_gates_match_without_the_wrapper():
    model = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), backend="eager")
    assert [layer.sparsity for layer in sc.plan(model, spread={"0.*": 0.25, "1.weight": 0.5}).layers] == [0.25, 0.5]
    assert list(sc.gate_(model, at="1", method="topk").gates) == ["_orig_mod.1"]
