"""Zeros and a grid from one solver: the weights that come out are stored without loss, and err less than rounded ones."""

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.methods import Amount, LayerProblem, as_method
from secateur.patterns import Pattern
from secateur.values import KINDS, Values

HOW = [("flow", "int8", None), ("flow", "int4", 64), ("sparsegpt", "int4", None), ("loss", "float8_e4m3fn", 128)]


def problem(rows=24, cols=96):
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(600, cols, generator=draw) @ (torch.eye(cols) + 0.1 * torch.randn(cols, cols, generator=draw))
    return LayerProblem("layer", torch.randn(rows, cols, generator=draw), H=x.T @ x)


def error(one, V):
    return float(one.objective(V).sum())


class Block(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.up, self.down = nn.Linear(width, 200, bias=False), nn.Linear(200, width)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


def model(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(Block()).to(dtype).eval()


def data(dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    mix = torch.randn(96, 96, generator=draw) / 10 + torch.eye(96)
    return [(torch.randn(64, 96, generator=draw) @ mix).to(dtype) for _ in range(2)]


def weights(net):
    return {name: layer.weight.detach().clone() for name, layer in net.named_modules() if hasattr(layer, "weight")}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("method", "kind", "group"), HOW)
def test_solved_weights_are_stored_bit_by_bit(method, kind, group, dtype):
    net, values = model(dtype), Values(kind, group or 0)
    how = {"loss": lambda out, x: (out - x).float().square().mean()} if method == "loss" else {}
    sc.prune_(net, method=f"{method}(values={kind!r}, group={group})", pattern="2:4", data=data(dtype), **how)
    for weight in weights(net).values():
        q, scales = values.quantize(weight)
        assert torch.equal(values.dequantize(q, scales).to(dtype), weight)
        assert bool((weight.unflatten(1, (-1, 4)) != 0).sum(2).le(2).all())


@pytest.mark.parametrize(("kind", "group"), [("int8", None), ("int8", 64), ("int4", 64)])
def test_compressing_and_decompressing_solved_weights_gives_them_back(kind, group, tmp_path):
    net, x = model(), data()[0][:1]
    sc.prune_(net, method=f"flow(values={kind!r}, group={group})", pattern="2:4", data=data())
    solved, before = weights(net), net(x)
    sc.compress_(net, x, values=kind, group=group, objective="size")
    stored = [layer for layer in net.modules() if isinstance(layer, sc.execute.Compressed)]
    assert len(stored) == 2
    assert all(f" {kind}" in layer.form for layer in stored)
    torch.testing.assert_close(net(x), before)
    sc.save(net, tmp_path / "model")
    loaded = sc.decompress_(sc.load(tmp_path / "model", model()))
    for name, weight in weights(loaded).items():
        assert torch.equal(weight.view(torch.int32), solved[name].view(torch.int32)), name


def test_the_table_of_compress_shows_which_layer_was_not_solved_for_the_numbers():
    net, x = model(), data()[0][:1]
    first, last = weights(net)
    sc.prune_(net, method="flow(values='int4', group=64)", pattern="2:4", data=data(), exclude=last)
    result = sc.compress_(net, x, values="int4", group=64, objective="size")
    errors = {row.layer: row.error for row in result.rows}
    assert errors[first] < 1e-5 < 1e-2 < errors[last]


@pytest.mark.parametrize("pattern", ["2:4", "unstructured"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_solver_errs_less_than_rounding_afterwards(kind, pattern):
    one, values = problem(), Values(kind, 64)
    amount = Amount(sparsity=None if pattern == "2:4" else 0.5)
    plain = as_method("admm").solve(one, Pattern.parse(pattern), amount, None)
    solved = as_method(f"admm(values={kind!r}, group=64)").solve(one, Pattern.parse(pattern), amount, None)
    rounded = values.dequantize(*values.quantize(plain.weight))
    assert torch.equal(solved.mask, plain.mask)
    extra = error(one, solved.weight) - error(one, plain.weight)
    assert 0 <= extra < 0.75 * (error(one, rounded) - error(one, plain.weight))
    assert solved.error > plain.error


def test_inputs_that_are_always_zero_and_rows_of_zeros_stay_finite():
    one = problem(rows=8, cols=72)
    one.H[:, 5] = one.H[5] = 0
    one.W[3] = 0
    one.W[4] *= 1e-42  # denormal
    for method in ("admm(values='int4', group=64)", "sparsegpt(values='int4', group=64)"):
        found = as_method(method).solve(one, Pattern.parse("2:4"), Amount(), None)
        assert bool(found.weight.isfinite().all())
        assert not bool(found.weight[3].any())
        q, scales = Values("int4", 64).quantize(found.weight)
        assert torch.equal(Values("int4", 64).dequantize(q, scales), found.weight)


def test_the_text_of_a_method_names_the_grid_and_reads_back():
    for text in ("flow(values='int4', group=64)", "sparsegpt(values='int8')", "loss(values='int4')", "admm(20, values='int4')"):
        method = as_method(text)
        assert as_method(str(method)) == method
        assert method.values in str(method)
    flow = sc.methods.admm(steps=8, target=sc.methods.flow(0.5, 0.75), reorder=True)
    assert as_method("flow") == as_method("flow()") == flow


def test_the_target_of_flow_is_not_an_argument_of_the_method_of_that_name():
    with pytest.raises(ValueError, match=r"values must be one of .*, not 0\.5"):
        as_method("flow(0.5)")


@pytest.mark.parametrize("make", [sc.methods.admm, sc.methods.sparsegpt])
def test_grids_that_no_format_stores_are_refused(make):
    for wrong, says in (
        ({"values": "int3"}, "int4"),
        ({"values": "int4", "group": 32}, "64 or 128"),
        ({"group": 64}, "say which values="),
    ):
        with pytest.raises(ValueError, match=says):
            make(**wrong)


def test_a_text_with_an_unknown_argument_is_answered_with_those_that_there_are():
    with pytest.raises(TypeError, match=r"^flow: .*'reorderr'; it takes values, group, reorder$"):
        as_method("flow(reorderr=False)")
