"""The one-shot methods on a GPU: evidence, curvature, orders and polish are those of the CPU."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch

import secateur as sc
from secateur.curvature import curvature
from secateur.methods import OnDevice, Solution, solve_all
from secateur.reorder import find_orders

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def data():
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(512, (4, 64))} for _ in range(8)]


def there(data):
    return [{"input_ids": batch["input_ids"].cuda()} for batch in data]


@contextlib.contextmanager
def exact_products():
    """Products of the dense run are rounded on CPUs that multiply bfloat16 in hardware, by oneDNN."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def evidence(model, data, residence=None):
    seen = {}

    def solve(target, found):
        seen[target.name] = {kind: value.double().cpu() for kind, value in found.items() if isinstance(value, torch.Tensor)}
        W = target.layout.matrix(target.weight)
        mask = W.abs() > W.abs().median()
        return Solution(mask, W * mask)

    solve_all(model, sc.targets(model)[0], frozenset({"gram", "cross", "residual"}), data, solve, {}, residence)
    return seen


@pytest.mark.parametrize("whole", [True, False], ids=["whole model", "one block at a time"])
def test_evidence_is_that_of_the_cpu(llama, data, whole):
    with exact_products():
        want = evidence(llama, data)
    if whole:
        got = evidence(copy.deepcopy(llama).cuda(), there(data))
    else:
        got = evidence(copy.deepcopy(llama), data, OnDevice(torch.device("cuda")))
    assert want.keys() == got.keys()
    for name, kinds in want.items():
        for kind, value in kinds.items():
            assert float((got[name][kind] - value).norm()) <= 1e-4 * float(value.norm()) + 1e-5, (name, kind)


def test_curvature_is_that_of_the_cpu(llama, data):
    gpu = copy.deepcopy(llama).cuda()
    with exact_products():
        want = curvature(llama, sc.targets(llama, exclude="lm_head")[0], data, gram="full")
    got = curvature(gpu, sc.targets(gpu, exclude="lm_head")[0], there(data), gram="full")
    for name, G in want.G.items():
        assert got.G[name].is_cuda
        assert float((got.G[name].cpu() - G).norm()) <= 1e-3 * float(G.norm()), name


def test_a_new_order_leaves_the_function_unchanged(llama, data):
    gpu, batches = copy.deepcopy(llama).cuda(), there(data)
    with torch.no_grad():
        before = gpu(**batches[0]).logits
        orders = find_orders(gpu, data=batches, exclude="lm_head", curvature="diag")
        assert orders.orders
        orders.apply_(gpu)
        torch.testing.assert_close(gpu(**batches[0]).logits, before, rtol=1e-3, atol=1e-4)
        orders.undo_(gpu)
    assert all(torch.equal(p.cpu(), q) for p, q in zip(gpu.parameters(), llama.parameters(), strict=True))


def test_flow_by_loss_and_polish_keep_the_count_and_the_zeros(llama, data):
    gpu, batches = copy.deepcopy(llama).cuda(), there(data)
    plan = sc.prune_(gpu, method="flow", sparsity=0.5, spread=sc.by_loss(), data=batches, exclude="lm_head")
    assert plan.metrics()["sparsity"] == 0.5
    zeros = {name: p == 0 for name, p in gpu.named_parameters() if p.ndim == 2}
    sc.distill_(gpu, copy.deepcopy(llama).cuda(), batches, steps=8, lr=1e-3)
    assert all(torch.equal(p == 0, zeros[name]) for name, p in gpu.named_parameters() if p.ndim == 2)
