"""Gates on a GPU zero the same elements as on the CPU, in every dtype, and their masks move with the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from secateur.activations import Gates, gate_
from secateur.methods.gates import Gate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

METHODS = ("threshold", "topk", "static")


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(24, 64, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64 * 6, 48), nn.Tanh(), nn.Linear(48, 10))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_the_first_layer_is_gated_as_on_the_cpu(method, dtype):
    data = [torch.randn(16, 24, 8, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3)]
    closed = []
    for device in ("cpu", "cuda"):
        model = small().to(device, dtype)
        gates = gate_(model, sparsity=0.4, at="0", data=[x.to(device) for x in data], method=method)
        closed.append(gates.gates["0"].close(data[0].to(device)).cpu())
    assert torch.equal(*closed)


@pytest.mark.parametrize("shape", [(3, 1), (64, 33), (17, 4096), (2, 11008)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_topk_breaks_ties_as_on_the_cpu(shape, dtype):
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).round().to(dtype)
    gate = Gate("x", "topk", 0.5)
    assert torch.equal(gate.close(x.cuda()).cpu(), gate.close(x))


@pytest.mark.parametrize("method", METHODS)
def test_gates_follow_the_model_to_the_gpu_and_into_a_graph(method):
    model, x = small(), torch.randn(16, 24, 8)
    gates = gate_(model, sparsity=0.5, data=[x], method=method, spread="greedy")
    gated = model(x)
    model.cuda()
    torch.testing.assert_close(model(x.cuda()).cpu(), gated, rtol=2e-2, atol=2e-2)
    torch._dynamo.reset()
    run = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(run(x.cuda()), model(x.cuda()))
    again = small().cuda()
    gates_again = Gates.load(again, gates.state_dict())
    torch.testing.assert_close(again(x.cuda()), model(x.cuda()))
    assert gates_again.measured(x.cuda()).sparsity == pytest.approx(gates.measured(x.cuda()).sparsity)
