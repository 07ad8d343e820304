"""Compressed models in files: loaded compressed or dense, bit for bit, and checked before a kernel uses them."""

import copy
import os

import pytest
import safetensors.torch
import torch
from saving import refused, resign
from torch import nn

import secateur as sc
from secateur import io
from secateur.execute import Compressed, decompress_
from secateur.execute.formats import FORMATS
from secateur.surgery import shrink

FORMS = {"embed": ("bitmask", ()), "conv": ("tiled", (1,)), "up": ("tiled", (4,)), "down": ("gather", ()), "head": ("csr", ())}
IDS = torch.randint(50, (2, 16), generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """One layer of each kind, two of them tied, one without a bias."""

    def __init__(self, seed: int = 1, zeros: float = 0.0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.conv = nn.Embedding(50, 64), nn.Conv1d(16, 16, 3, padding=1, groups=2)
        self.up, self.down, self.head = nn.Linear(64, 256), nn.Linear(256, 64, bias=False), nn.Linear(64, 50)
        if zeros:
            sc.prune_(self, sparsity=zeros)
            sc.prune_(self, sparsity=zeros, include="embed.weight")
        self.head.weight = self.embed.weight
        with torch.no_grad():
            self.down.weight[0, :2] = torch.tensor([-0.0, 1e-30])

    def forward(self, ids):
        return self.head(self.down(torch.relu(self.up(self.conv(self.embed(ids))))))


def compressed(*names: str, store: torch.dtype | None = None) -> nn.Module:
    model = Net(0, zeros=0.9).eval()
    tied = ("embed.weight", "head.weight")
    for name in names or FORMS:
        form, options = FORMS[name]
        ties = tied if name in ("embed", "head") else ()
        setattr(model, name, Compressed(getattr(model, name), FORMATS[form], options, ties, store))
    return model


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype and torch.equal(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8))
        for n in a
    )


def dense(model: nn.Module) -> nn.Module:
    return decompress_(copy.deepcopy(model))


@pytest.mark.parametrize("store", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("into", ["function", "model", "compressed model", "meta"])
def test_a_compressed_model_comes_back_buffer_for_buffer(tmp_path, into, store):
    names = [name for name in FORMS if not (store and name == "head")]
    model = compressed(*names, store=store)
    io.save(model, tmp_path)
    given = {"function": Net, "model": Net().eval(), "compressed model": compressed("up"), "meta": lambda: Net().to("meta")}
    back = io.load(tmp_path, given[into]).eval()
    assert equal(back.state_dict(), model.state_dict())
    assert {n: type(m) for n, m in back.named_children()} == {n: type(m) for n, m in model.named_children()}
    with torch.no_grad():
        assert torch.equal(back(IDS), model(IDS))
    assert equal(dense(back).state_dict(), dense(model).state_dict())


@pytest.mark.parametrize("names", [(), ("embed",), ("head",), ("up", "conv")], ids=str)
def test_dense_on_demand_is_what_decompress_gives(tmp_path, names):
    model = compressed(*names)
    io.save(model, tmp_path)
    expected = dense(model).state_dict()
    back = io.load(tmp_path, Net, as_="dense")
    assert not any(isinstance(m, Compressed) for m in back.modules())
    assert equal(back.state_dict(), expected)
    assert back.head.weight is back.embed.weight
    assert equal(io.dense_state_dict(tmp_path), expected)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    alone = io.dense_state_dict(tensors)
    assert equal(alone, {name: expected[name] for name in alone})
    assert sum(name.startswith(("embed.weight", "head.weight")) for name in tensors) in (1, 3)  # tied: once


def test_a_weight_that_was_rounded_is_tied_no_more(tmp_path):
    model = compressed("head", store=torch.bfloat16)
    io.save(model, tmp_path)
    back = io.load(tmp_path, Net, as_="dense")
    assert equal(back.state_dict(), dense(model).state_dict())
    assert equal(io.dense_state_dict(tmp_path), dense(model).state_dict())
    assert not torch.equal(back.head.weight, back.embed.weight)
    assert equal(io.load(tmp_path, Net).state_dict(), model.state_dict())


def test_after_a_move_to_another_dtype(tmp_path):
    model = compressed().to(torch.bfloat16)
    io.save(model, tmp_path)
    back = io.load(tmp_path, lambda: Net().to(torch.bfloat16))
    assert equal(dense(back).state_dict(), dense(model).state_dict())
    refused(tmp_path, Net(), "in the model and BF16 in the file")


def test_a_small_and_compressed_model_is_cut_and_compressed_again(tmp_path):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()

    small, _ = shrink(build(), torch.randn(2, 32), channels=0.5)
    sc.prune_(small, sparsity=0.9)
    small[2] = Compressed(small[2], FORMATS["tiled"], (1,))
    io.save(small, tmp_path)
    assert equal(io.load(tmp_path, build).state_dict(), small.state_dict())
    assert equal(io.load(tmp_path, build, as_="dense").state_dict(), dense(small).state_dict())


def test_a_layer_in_two_places_stays_one(tmp_path):
    def build():
        layer = nn.Linear(32, 32)
        return nn.Sequential(layer, nn.ReLU(), layer).eval()

    model = build()
    sc.prune_(model, sparsity=0.9)
    model[0] = model[2] = Compressed(model[0], FORMATS["tiled"], (1,))
    io.save(model, tmp_path)
    back = io.load(tmp_path, build)
    assert back[0] is back[2]
    assert equal(back.state_dict(), model.state_dict())
    again = io.load(tmp_path, build, as_="dense")
    assert again[0] is again[2]


def test_what_compress_chose_comes_back_and_the_file_is_small(tmp_path):
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval()
    sc.prune_(model, sparsity=0.9)
    io.save(model, tmp_path / "dense")
    sc.compress_(model, torch.randn(64, 512), objective="size")
    io.save(model, tmp_path / "small")
    before, after = (os.path.getsize(tmp_path / kind / "model.safetensors") for kind in ("dense", "small"))
    assert after <= 0.14 * before
    back = io.load(tmp_path / "small", lambda: nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)))
    assert equal(back.state_dict(), model.state_dict())


def test_files_are_not_believed(tmp_path):
    model = compressed()

    def wrong(change, words):
        io.save(model, tmp_path)
        resign(tmp_path, change)
        refused(tmp_path, Net(), words)

    wrong(lambda d: d["layers"]["up"].update(format="tilde"), "not known here.*as_='dense'.*Did you mean 'tiled'")
    wrong(lambda d: d["layers"]["up"].update(options=[1 << 40]), "not known here")
    wrong(lambda d: d["layers"]["up"].update(options=[-1]), "unknown format")
    wrong(lambda d: d["layers"]["up"].update(format="pairs", options=[1, 1]), "cannot be held")
    wrong(lambda d: d["layers"]["up"].update(dtype="F16"), "in the model and F16")
    wrong(lambda d: d["layers"].update(relu=d["layers"]["up"]), "its weight is not in the file")
    wrong(lambda d: d.update(layers=[]), "should be a dict")
    io.save(model, tmp_path)
    resign(tmp_path, lambda d: d["layers"]["up"].update(format="of a later version"))
    assert equal(io.load(tmp_path, Net, as_="dense").state_dict(), dense(model).state_dict())


def test_a_layer_that_cannot_be_compressed_here_is_named(tmp_path):
    model = nn.Sequential(nn.Linear(8, 8))
    model[0] = Compressed(model[0], FORMATS["tiled"], (1,))
    io.save(model, tmp_path)

    class Own(nn.Linear):
        pass

    refused(tmp_path, nn.Sequential(Own(8, 8)), "'0' is compressed in the file and cannot be here: Own is not a layer")
    with pytest.raises(ValueError, match="compressed layer by itself"):
        io.save(model[0], tmp_path)
