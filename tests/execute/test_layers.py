"""Compressed layers are ordinary modules: they compile, export, copy, move, save and load. They refuse to train."""

import copy
import io
import mmap
import pickle
import subprocess
import sys
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from secateur.execute import Compressed, decompress_
from secateur.execute.formats import FORMATS

from .patterns import pruned

FORMS = {"tiled": (4,), "csr": (), "gather": (), "runs": (), "panels": (16,), "bitmask": (), "columns": ()}


class Net(nn.Module):
    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.conv, self.line = nn.Embedding(50, 32), nn.Conv2d(4, 8, 3, padding=1), nn.Conv1d(8, 8, 3, groups=2)
        self.linear = nn.Linear(32, 32)
        with torch.no_grad():
            for i, layer in enumerate(self.children()):
                shape = layer.weight.shape
                layer.weight.copy_(pruned(shape[0], layer.weight[0].numel(), "1x1", 0.6, seed=seed + i).reshape(shape))

    def forward(self, ids):
        x = self.linear(self.embed(ids))  # [batch, 8, 32]
        x = self.conv(x.view(-1, 4, 8, 8))
        return self.line(x.flatten(2)).relu()


def compressed(form: str = "tiled", seed: int = 0) -> nn.Module:
    model = Net(seed).eval()
    for name, layer in list(model.named_children()):
        own = {"linear": form, "embed": "bitmask"}.get(name, "tiled")
        setattr(model, name, Compressed(layer, FORMATS[own], FORMS[own] if own != "tiled" or name == "linear" else (1,)))
    return model


@pytest.fixture
def ids():
    return torch.randint(50, (2, 8))


@pytest.fixture
def expected(ids):
    with torch.no_grad():
        return Net().eval()(ids)


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", sorted(FORMS))
def test_runs_eagerly_and_decompresses_in_every_format(form, ids, expected):
    model = compressed(form)
    with torch.no_grad():
        close(model(ids), expected)
    dense = decompress_(model).state_dict()
    assert all(torch.equal(value, dense[name]) for name, value in Net().state_dict().items())


@pytest.mark.parametrize("grad", [False, True])
def test_compiles_as_one_graph(ids, expected, grad):
    with torch.set_grad_enabled(grad):
        close(torch.compile(compressed(), fullgraph=True, backend="aot_eager")(ids).detach(), expected)


def test_compiles_with_inductor(ids, expected):
    with torch.no_grad():
        close(torch.compile(compressed(), fullgraph=True)(ids), expected)


def test_exports(ids, expected):
    with torch.no_grad():
        program = torch.export.export(compressed(), (ids,))
        close(program.module()(ids), expected)


@pytest.mark.parametrize("grad", [False, True])
def test_an_exported_program_loads_in_a_process_that_only_imported_secateur(grad, ids, expected, tmp_path):
    with torch.set_grad_enabled(grad):
        torch.export.save(torch.export.export(compressed(), (ids,)), tmp_path / "program.pt2")
    torch.save(ids, tmp_path / "ids.pt")
    code = """
import sys, torch, secateur
assert "secateur.execute" not in sys.modules
folder = sys.argv[1]
module = torch.export.load(f"{folder}/program.pt2").module()
with torch.set_grad_enabled(sys.argv[2] == "True"):
    output = module(torch.load(f"{folder}/ids.pt"))
if output.requires_grad:
    output.sum().backward()
torch.save((output.detach(), {name: one.grad for name, one in module.named_parameters()}), f"{folder}/output.pt")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path), str(grad)], check=True)
    output, gradients = torch.load(tmp_path / "output.pt")
    close(output, expected)
    if grad:
        dense = Net()
        dense(ids).sum().backward()
        close(gradients["linear.bias"], dense.linear.bias.grad)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the exporter with dynamo=True needs the package onnxscript
def test_export_to_onnx_names_decompress(ids):
    with pytest.raises(RuntimeError, match=r"ONNX has no operator .* call secateur.decompress_\(model\)"):
        torch.onnx.export(compressed(), (ids,), io.BytesIO(), dynamo=False)


def test_operators_keep_the_rules_of_torch(ids):
    layer = compressed().linear
    x = torch.randn(5, 32)
    held = layer.buffers_in_order()
    arguments = (x, held, layer.bias.detach(), layer.form, layer.rows, layer.columns, layer.options)
    torch.library.opcheck(torch.ops.secateur.linear.default, arguments)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_and_pickles(how, ids, expected):
    model = compressed()
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        other = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    with torch.no_grad():
        close(other(ids), expected)
        other.linear.values.zero_()
        close(model(ids), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_moves_to_another_dtype(dtype, ids, expected):
    model = compressed().to(dtype)
    with torch.no_grad():
        y = model(ids)
        assert y.dtype == dtype
        torch.testing.assert_close(y.float(), expected, rtol=0.1, atol=0.1)
    assert decompress_(model).linear.weight.dtype == dtype


def test_layer_without_bias_has_the_dtype_it_was_moved_to():
    for store in (None, torch.float16):
        model = nn.Sequential(Compressed(nn.Linear(32, 32, bias=False), FORMATS["tiled"], (1,), store=store))
        assert decompress_(copy.deepcopy(model))[0].weight.dtype == torch.float32
        for dtype in (torch.bfloat16, torch.float16):
            assert decompress_(copy.deepcopy(model).to(dtype))[0].weight.dtype == dtype
        assert decompress_(model.to(torch.bfloat16).float())[0].weight.dtype == torch.float32


def test_weights_in_half_the_bytes_do_not_change_what_comes_out():
    embed = Compressed(nn.Embedding(50, 32), FORMATS["bitmask"], (), store=torch.bfloat16)
    assert embed.eval()(torch.arange(4)).dtype == torch.float32


def test_those_who_watch_operators_see_them(ids):
    model = compressed()
    weights = sum(int(layer.weight.count_nonzero()) * n for layer, n in ((model.conv, 2 * 64), (model.line, 2 * 62)))
    with torch.no_grad(), FlopCounterMode(display=False) as count:
        model(ids)
    linear = count.get_flop_counts()["Global"][torch.ops.secateur.linear]
    assert linear == 2 * 16 * model.linear.values.numel()
    assert count.get_flop_counts()["Global"][torch.ops.secateur.conv] == 2 * weights


@pytest.mark.parametrize("grad", [False, True])
def test_a_trace_computes_and_remembers_no_numbers(ids, expected, grad):
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit warns that it is deprecated
        traced = torch.jit.trace(compressed(), torch.zeros_like(ids))
        close(traced(ids).detach(), expected)
    assert traced(ids).requires_grad


def test_state_dict_loads_into_another_compressed_model(ids, tmp_path):
    source, target = compressed(seed=7), compressed(seed=0)
    with torch.no_grad():
        expected = source(ids)
        save_file(source.state_dict(), tmp_path / "model.safetensors")
        target.load_state_dict(load_file(tmp_path / "model.safetensors"))
        assert torch.equal(target(ids), expected)


def test_dense_state_dict_loads_into_a_compressed_model(ids):
    dense, target = Net(seed=5).eval(), compressed(seed=0)
    with torch.no_grad():
        dense.linear.weight[0, 0] = -0.0
        target.load_state_dict(dense.state_dict())
        close(target(ids), dense(ids))
    restored = decompress_(target).linear.weight
    assert torch.equal(torch.signbit(restored), torch.signbit(dense.linear.weight))
    with pytest.raises((ValueError, RuntimeError), match="weight"):
        compressed().load_state_dict({name: value[:1] for name, value in dense.state_dict().items()})


def test_train_mode_names_decompress(ids):
    model = compressed()
    model.train()
    with pytest.raises(RuntimeError, match=r"train mode.*decompress_"):
        model(ids)
    model.eval()(ids)


def test_inputs_and_biases_have_gradients():
    layer, conv = Net().linear, Net().conv
    x, image = torch.randn(3, 32, requires_grad=True), torch.randn(2, 4, 6, 6, requires_grad=True)
    for dense, options, seen in ((layer, (4,), x), (conv, (1,), image)):
        packed = Compressed(dense, FORMATS["tiled"], options).eval()
        want = torch.autograd.grad(dense(seen).square().sum(), [seen, dense.bias])
        got = torch.autograd.grad(packed(seen).square().sum(), [seen, packed.bias])
        for one, other in zip(got, want):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_hooks_stay_with_the_layer(ids):
    layer, seen = nn.Linear(32, 32), []
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(module))
    packed = Compressed(layer, FORMATS["tiled"], (1,)).eval()
    packed(torch.randn(2, 32))
    assert seen == [packed]
    handle.remove()
    packed(torch.randn(2, 32))
    assert seen == [packed]


def test_unbatched_images_and_lines_run():
    conv, line = compressed().conv, compressed().line
    with torch.no_grad():
        close(conv(torch.ones(4, 6, 6)), Net().conv(torch.ones(4, 6, 6)))
        close(line(torch.ones(8, 9)), Net().line(torch.ones(8, 9)))


def test_repr_says_what_it_is():
    assert "Linear (32, 32), tiled[4]" in repr(compressed())


def test_large_packed_weights_are_copied_bit_for_bit():
    """They lie in other memory than the packing used: in huge pages, where the system has them."""
    from secateur import kernels
    from secateur.kernels import arrays

    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        large = torch.randint(-100, 100, (3 << 20,)).to(dtype)
        copied = kernels.in_huge_pages(large)
        assert torch.equal(copied, large)
        assert copied.dtype == dtype
        assert copied.untyped_storage().nbytes() == large.nbytes  # what torch.save writes
        assert not arrays._system_has_huge_pages() or copied.data_ptr() % (1 << 21) == 0
    small, strided = torch.ones(8), torch.ones(2000, 2000).T
    assert kernels.in_huge_pages(small) is small
    assert kernels.in_huge_pages(strided) is strided


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no huge pages to advise")
def test_kernels_without_huge_pages_are_no_error(monkeypatch):
    from secateur import kernels

    class Refusing(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Refusing)
    large = torch.randn(1 << 20)
    assert torch.equal(kernels.in_huge_pages(large), large)
