"""Compressed layers on a GPU: each format against the dense product, restoring, and the measured choice."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from secateur.execute import Compressed, bench, compress_, decompress_
from secateur.execute.formats import FORMATS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

HALVES = (torch.bfloat16, torch.float16)
FORMATS_OF = {
    "sparse24_mma": [()],
    "padded_rows": [(), (16,)],
    "input_sparse": [()],
    "dense_blocks": [(64,), (128,)],
    "cusparselt": [()],
}


def pruned(rows: int, columns: int, pattern: str, sparsity: float, dtype: torch.dtype) -> Tensor:
    """A matrix in this pattern with a few more zeros, one row of zeros, and another count in the last row."""
    weight = torch.randn(rows, columns, device="cuda").to(dtype)
    if pattern == "2:4":
        keep = (torch.rand(rows, columns // 4, 4, device="cuda").argsort(-1) < 2).view(rows, columns)
    else:
        size = int(pattern)
        blocks = torch.rand(-(-rows // size), -(-columns // size), device="cuda") >= sparsity
        keep = blocks.repeat_interleave(size, 0).repeat_interleave(size, 1)[:rows, :columns]
    keep &= torch.rand(rows, columns, device="cuda") >= 0.05
    keep[0] = False
    return weight.masked_fill(~keep, 0)


def case(name: str, seed: int):
    """A random matrix that suits the format, and random inputs."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    options = draw.choice(FORMATS_OF[name])
    dtype = torch.bfloat16 if name == "cusparselt" else draw.choice(HALVES)
    sizes = {
        "sparse24_mma": ([1, 16, 40, 100, 512, 1000], [4, 132, 256, 520, 2048, 4096], [1, 2, 7, 8, 9, 16, 17, 40]),
        "padded_rows": ([1, 7, 100, 1024], [5, 256, 700, 4096, 9000], [1, 1, 2, 4]),
        "input_sparse": ([1, 100, 256, 1000], [1, 33, 700, 4096], [1, 1, 3]),
        "dense_blocks": ([128, 384, 1024], [128, 256, 1024], [1, 64, 100, 300, 2048, 2100]),
        "cusparselt": ([256, 320, 1024], [256, 512, 1024], [8, 64, 100, 1024]),
    }
    rows, columns, tokens = (draw.choice(each) for each in sizes[name])
    pattern = {"sparse24_mma": "2:4", "cusparselt": "2:4", "dense_blocks": str(options[0]) if options else ""}.get(name, "1")
    matrix = pruned(rows, columns, pattern, draw.choice([0.0, 0.5, 0.8, 0.95]), dtype)
    x = torch.randn(tokens, 2 * columns, device="cuda").to(dtype)
    x = draw.choice([x[:, :columns].contiguous(), x[:, columns:], x[:, ::2]])
    if name == "input_sparse":
        x = x * (torch.rand_like(x, dtype=torch.float32) < 0.5)
    bias = torch.randn(rows, device="cuda").to(dtype) if draw.random() < 0.5 else None
    return options, matrix, x, bias


def near(got: Tensor, x: Tensor, matrix: Tensor, bias: Tensor | None) -> bool:
    """True if `got` equals the product in float64 up to the rounding of its dtype, relative to the size of the terms."""
    exact = F.linear(x.double(), matrix.double(), None if bias is None else bias.double())
    size = F.linear(x.double().abs(), matrix.double().abs(), None if bias is None else bias.double().abs())
    return bool(((got.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-5 * size + 1e-6).all())


def check(name: str, seed: int) -> None:
    options, matrix, x, bias = case(name, seed)
    form, (rows, columns) = FORMATS[name], matrix.shape
    packed = form.pack(matrix, options)
    assert torch.equal(form.unpack(packed, rows, columns, options), matrix)
    y = torch.ops.secateur.linear(x, list(packed), bias, name, rows, columns, options)
    assert y.shape == (len(x), rows)
    assert y.dtype == x.dtype
    assert near(y, x, matrix, bias)
    if bool((matrix != 0).any()):
        ran = form.linear(x, packed, bias, rows, options)  # by the kernel, not by unpacking
        assert ran is not None
        assert near(ran, x, matrix, bias)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("name", ["sparse24_mma", "padded_rows", "input_sparse", "dense_blocks"])
def test_every_kernel_computes_what_dense_does(name, seed):
    check(name, seed)


@pytest.mark.parametrize("name", ["sparse24_mma", "padded_rows", "input_sparse", "dense_blocks"])
def test_packed_on_a_gpu_a_layer_computes_on_the_cpu_too(name):
    options, matrix, x, _ = case(name, 3)
    packed = [each.cpu() for each in FORMATS[name].pack(matrix, options)]
    assert all(torch.equal(a, b) for a, b in zip(packed, FORMATS[name].pack(matrix.cpu(), options)))
    y = torch.ops.secateur.linear(x.cpu().float(), packed, None, name, *matrix.shape, options)
    assert near(y.cuda(), x, matrix, None)


def test_cusparselt_unpacks_anywhere():
    options, matrix, *_ = case("cusparselt", 1)
    packed = FORMATS["cusparselt"].pack(matrix, options)
    assert torch.equal(FORMATS["cusparselt"].unpack([each.cpu() for each in packed], *matrix.shape, options), matrix.cpu())


@pytest.mark.parametrize("name", ["sparse24_mma", "cusparselt"])
def test_three_of_four_are_refused(name):
    with pytest.raises(ValueError, match="more than two weights"):
        FORMATS[name].pack(torch.ones(256, 256, dtype=torch.bfloat16, device="cuda"), ())


def test_cusparselt_refuses_what_it_cannot_pack():
    with pytest.raises(ValueError, match="packs bfloat16 matrices on a GPU"):
        FORMATS["cusparselt"].pack(torch.zeros(256, 256, dtype=torch.float16, device="cuda"), ())
    with pytest.raises(ValueError, match="multiples of 64"):
        FORMATS["cusparselt"].pack(torch.zeros(250, 256, dtype=torch.bfloat16, device="cuda"), ())


def two_of_four(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        layer.weight.copy_(pruned(*layer.weight.shape, "2:4", 0.5, layer.weight.dtype))
    return layer


def apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def decoder() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [two_of_four(nn.Linear(4096, 8192)), nn.ReLU(), two_of_four(nn.Linear(8192, 4096, bias=False))]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16).eval()


@pytest.mark.parametrize(("tokens", "expected"), [(1, "sparse24_mma"), (16, "sparse24_mma"), (2048, "cusparselt")])
def test_a_pruned_model_gets_faster_and_comes_back_bit_for_bit(tokens, expected):
    model = decoder()
    dense, x = copy.deepcopy(model), torch.randn(tokens, 4096, device="cuda").bfloat16()
    result = compress_(model, x)
    print(result)
    assert all(row.format.startswith(expected) for row in result.rows)
    assert result.speedup > 1.05
    with torch.no_grad():
        assert apart(model(x), dense(x)) < 1e-2
        other = torch.randn(33, 4096, device="cuda").bfloat16()  # a shape that was not measured
        assert apart(model(other), dense(other)) < 1e-2
    decompress_(model)
    for a, b in zip(model.parameters(), dense.parameters()):
        assert torch.equal(a, b)


def test_compressed_layers_copy_save_compile_and_run_in_a_graph():
    model = decoder()
    x = torch.randn(4, 4096, device="cuda").bfloat16()
    compress_(model, x)
    assert isinstance(model[0], Compressed)
    with torch.no_grad():
        expected = model(x)
        assert torch.equal(copy.deepcopy(model)(x), expected)
        state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
        model.load_state_dict(state)
        assert torch.equal(model(x), expected)
        model.load_state_dict({name: tensor.cpu() for name, tensor in decoder().state_dict().items()})  # dense weights
        assert model[0].get_buffer("values").is_cuda
        assert torch.equal(model(x), expected)
        assert torch.equal(torch.compile(model, fullgraph=True)(x), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)
    assert "model" in str(bench(model, x, seconds=0.1))


def test_gated_inputs_skip_weights():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(14336, 8192, bias=False)).to("cuda", torch.bfloat16).eval()
    x = torch.randn(1, 14336, device="cuda").bfloat16() * (torch.rand(1, 14336, device="cuda") < 0.3)
    dense = copy.deepcopy(model)
    result = compress_(model, x)
    assert result.compressed == ["0"], str(result)
    assert result.rows[0].format == "input_sparse"
    with torch.no_grad():
        assert apart(model(x), dense(x)) < 1e-2


def test_unstructured_and_block_layers_find_their_formats():
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(4096, 14336, bias=False)).to("cuda", torch.bfloat16)
    blocks = copy.deepcopy(one)
    with torch.no_grad():
        one[0].weight.copy_(pruned(14336, 4096, "1", 0.9, torch.bfloat16))
        blocks[0].weight.copy_(one[0].weight.masked_fill(pruned(14336, 4096, "64", 0.9, torch.bfloat16) == 0, 0))
        keep = torch.rand(14336 // 64, 64, device="cuda") > 0.9
        blocks[0].weight.copy_(torch.randn(14336, 4096, device="cuda") * keep.repeat_interleave(64, 0).repeat_interleave(64, 1))
    assert compress_(one, torch.randn(1, 4096, device="cuda").bfloat16()).rows[0].format.startswith("padded_rows")
    result = compress_(blocks, torch.randn(4096, 4096, device="cuda").bfloat16())
    assert result.rows[0].pattern == "64x64"
    assert result.rows[0].format == "dense_blocks 64"


class Failing(nn.Sequential):
    """Fails at the second call with compressed layers: the first one is the check of all layers, the next is timed."""

    seen = 0

    def forward(self, x):
        self.seen += isinstance(self[0], Compressed)
        if self.seen > 1:
            raise RuntimeError("out of memory")
        return super().forward(x)


def test_a_failure_while_calls_are_timed_leaves_the_model_as_it_was():
    layer = nn.Linear(4096, 14336, bias=False).to("cuda", torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(pruned(14336, 4096, "1", 0.9, torch.bfloat16))
    model = Failing(layer)
    with pytest.raises(ValueError, match="out of memory"):
        compress_(model, torch.randn(1, 4096, device="cuda").bfloat16())
    assert model[0] is layer


def test_layers_that_no_format_helps_stay_dense_and_say_why():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)).to("cuda").eval()  # float32
    with torch.no_grad():
        model[0].weight.masked_fill_(torch.rand(512, 512, device="cuda") < 0.3, 0)
    result = compress_(model, torch.randn(4, 512, device="cuda"))
    assert not result.compressed
    assert "bfloat16 and float16" in result.rows[0].reason
    assert "no weight is zero" in result.rows[1].reason


@pytest.mark.parametrize("seed", range(24))
def test_cusparselt_computes_what_dense_does(seed):  # last, because a crash of the library would end all later tests
    check("cusparselt", seed)
