"""Gates are saved with the model and attached again by `load`."""

import pytest
import torch
from saving import X, build, refused, resign, same

import secateur as sc
from secateur import io


def gated(method="threshold"):
    model = build()
    sc.gate_(model, at="4", sparsity=0.6, method=method, data=[X])
    return model


@pytest.mark.parametrize("method", ["threshold", "topk", "static"])
def test_a_gated_model_comes_back_gated(tmp_path, method):
    """`save` dropped gates without a word, and the loaded model gave other outputs."""
    model = gated(method)
    said = io.save(model, tmp_path)
    assert [step for step, _ in said["history"]] == ["gate"]
    again = io.load(tmp_path, build)
    assert same(again, model)
    assert str(sc.Gates.of(again)) == str(sc.Gates.of(model))
    assert torch.equal(again(X), model(X))
    assert not torch.equal(again(X), build()(X))
    io.save(again, tmp_path / "second")
    assert (tmp_path / "second" / "secateur.json").read_bytes() == (tmp_path / "secateur.json").read_bytes()


def test_gates_of_a_model_that_was_cut_later_are_saved(tmp_path):
    """The gate was made for more features than its layer has now."""
    small, _ = sc.shrink(gated(), X, channels=0.5)
    io.save(small, tmp_path)
    assert torch.equal(io.load(tmp_path, build)(X), small(X))


def test_saved_gates_replace_others(tmp_path):
    io.save(gated("topk"), tmp_path)
    again = io.load(tmp_path, gated("static"))
    assert sc.Gates.of(again).gates["4"].method == "topk"
    assert torch.equal(again(X), gated("topk")(X))


@pytest.mark.parametrize("saved", [build, gated], ids=["plain", "gated"])
def test_a_gated_model_becomes_the_saved_one(tmp_path, saved):
    """It lost the gates of the file from its record, and kept its own where the file has none."""
    io.save(saved(), tmp_path)
    again = io.load(tmp_path, gated("topk"))
    assert torch.equal(again(X), saved()(X))
    io.save(again, tmp_path / "second")
    assert (tmp_path / "second" / "secateur.json").read_bytes() == (tmp_path / "secateur.json").read_bytes()


def test_gates_and_compressed_layers_go_together(tmp_path):
    model = gated()
    sc.prune_(model, sparsity=0.9)
    sc.compress_(model, X, objective="size")
    io.save(model, tmp_path)
    assert torch.equal(io.load(tmp_path, build)(X), model(X))
    assert sc.Gates.of(io.load(tmp_path, build, as_="dense")).gates.keys() == {"4"}


BROKEN = {
    "another layer": (lambda gates: gates.update({"9": gates.pop("4")}), "'9', which the model does not have"),
    "a field less": (lambda gates: gates["4"].pop("method"), "is not one that"),
    "too many zeros": (lambda gates: gates["4"].update(sparsity=5.0), "a sparsity of 5"),
    "words for a number": (lambda gates: gates["4"].update(threshold="high"), "finite numbers"),
    "a mask past the end": (lambda gates: gates["4"].update(mask="0-600"), "indices below 576"),
    "a huge mask": (lambda gates: gates["4"].update(features=10**12), "number of features"),
    "other features": (
        lambda gates: gates["4"].update(features=12, mask="0-5"),
        "takes 576 features, but its gate was made for 12",
    ),
    "a number past all floats": (lambda gates: gates["4"].update(weights=10**400), "finite numbers"),
    "an empty list for a number": (lambda gates: gates["4"].update(calibrated=[]), "finite numbers"),
    "fewer weights than none": (lambda gates: gates["4"].update(weights=-1), "a number of weights"),
    "no mapping": (lambda gates: gates.update({"4": 3}), "is not described as one"),
}


@pytest.mark.parametrize(("change", "words"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("into", [build, gated], ids=["plain", "gated"])
def test_gates_that_do_not_fit_leave_the_model_as_it_was(tmp_path, change, words, into):
    io.save(gated("static"), tmp_path)
    resign(tmp_path, lambda data: change(data["gates"]))
    model = into()
    torch.nn.init.normal_(model[4].weight)  # else the weights of the file would not be noticed
    before = model(X)
    refused(tmp_path, model, words)
    assert torch.equal(model(X), before)


def test_a_load_that_fails_after_a_cut_leaves_gates_and_their_handle(tmp_path):
    """The gates were attached again as copies, which `undo_` did not find, or not at all because the layer was cut by then."""
    small, _ = sc.shrink(gated(), X, channels=0.5)
    io.save(small, tmp_path)
    resign(tmp_path, lambda data: data["gates"].update({"9": data["gates"].pop("4")}))
    model = build(seed=1)
    dense = model(X)
    gates = sc.gate_(model, at="4", sparsity=0.6, data=[X])
    before = model(X)
    refused(tmp_path, model, "which the model does not have")
    assert torch.equal(model(X), before)
    gates.undo_()
    assert torch.equal(model(X), dense)


def test_gates_of_layers_without_weights_and_masks_without_features(tmp_path):
    model, again = (torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)) for _ in range(2))
    entry = {"method": "static", "sparsity": 0.5, "axis": -1, "features": 3, "weights": 0, "threshold": 0, "calibrated": None}
    sc.Gates.load(model, {"1": {**entry, "mask": torch.zeros(3, dtype=torch.bool)}})
    io.save(model, tmp_path)
    x = torch.randn(2, 4)
    assert torch.equal(io.load(tmp_path, again)(x), model(x))


def test_prune_folder_refuses_gates(tmp_path):
    """It writes no manifest, so the gates would be lost."""
    io.save(gated(), tmp_path / "a")
    with pytest.raises(ValueError, match="holds a model with gates"):
        sc.prune_folder(tmp_path / "a", tmp_path / "b", sparsity=0.5, into=build)
    assert not (tmp_path / "b").exists()


def test_from_pretrained_is_not_offered_a_model_with_gates(tmp_path):
    """It would load the weights and leave the gates out."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 40}
    config = transformers.LlamaConfig(**sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(0))
    gates = sc.gate_(model, data=[{"input_ids": ids}])
    assert "has gates; remove them first" in io.save(model, tmp_path)["from_pretrained"]
    assert not (tmp_path / "config.json").exists()
    assert torch.equal(io.load(tmp_path, lambda: transformers.LlamaForCausalLM(config).eval())(ids).logits, model(ids).logits)
    gates.undo_()
    assert io.save(model, tmp_path)["from_pretrained"] is True
