"""User code for torch.ao.pruning runs unchanged: subclasses, training, compilers, quantization."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.ao.pruning as theirs
import torch.ao.quantization as quantization
from torch import Tensor, nn
from torch.nn.utils import parametrize

import secateur.drop_in.ao_pruning as ours

BOTH = pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "torch"])


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))


def prepared(library=ours, **settings):
    model, sparsifier = net(), library.WeightNormSparsifier(**settings)
    sparsifier.prepare(model, None)
    sparsifier.step()
    return model, sparsifier


# --- subclasses -----------------------------------------------------------------------------------------------------------


def threshold_class(library, dtype):
    class Threshold(library.BaseSparsifier):
        def __init__(self, threshold):
            super().__init__(defaults={"threshold": threshold})
            self.calls = []

        def update_mask(self, module, tensor_name, threshold, **kwargs):
            self.calls.append((kwargs["tensor_fqn"], kwargs["module_fqn"], kwargs.get("note")))
            mask = getattr(module.parametrizations, tensor_name)[0].mask
            mask.data = (getattr(module, tensor_name).abs() > threshold).to(dtype)
            state = self.state[kwargs["tensor_fqn"]]
            state["step_count"] = state.get("step_count", 0) + 1

    return Threshold


@BOTH
@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float32, torch.float64], ids=str)
def test_a_subclass_that_replaces_the_mask_by_any_dtype(library, dtype):
    if library is theirs and dtype == torch.float64:
        pytest.skip("torch's masks of float64 make a float32 layer fail")
    model, sparsifier = net(), threshold_class(library, dtype)(0.1)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "note": "hello"}, {"tensor_fqn": "2.weight", "threshold": 0.2}])
    dense = [layer.weight.detach().clone() for layer in (model[0], model[2])]
    for _ in range(2):
        sparsifier.step()
    for layer, weight, threshold in zip((model[0], model[2]), dense, (0.1, 0.2), strict=True):
        assert torch.equal(layer.weight.detach(), weight * (weight.abs() > threshold))
    assert sparsifier.calls[:2] == [("0.weight", "0", "hello"), ("2.weight", "2", None)]
    assert sparsifier.state_dict()["state"]["2.weight"]["step_count"] == 2
    model(torch.randn(2, 16)).sum().backward()
    sparsifier.squash_mask()
    assert (model[0].weight == 0).any()


def test_the_masks_of_a_subclass_go_through_a_state_bit_for_bit():
    kind = threshold_class(ours, torch.bool)
    model, sparsifier = net(), kind(0.1)
    sparsifier.prepare(model, None)
    sparsifier.step()
    file = io.BytesIO()
    torch.save(sparsifier.state_dict(), file)
    file.seek(0)
    twin, other = net(), kind(0.9)
    other.prepare(twin, None)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert other.state == sparsifier.state
    assert twin[0].parametrizations.weight[0].mask.dtype == torch.bool
    assert other.groups[0]["threshold"] == 0.1


@BOTH
def test_a_parametrization_and_a_mask_of_the_users_own(library):
    class Doubled(library.FakeSparsity):
        def forward(self, x):
            return 2 * super().forward(x)

    model, sparsifier = net(), library.WeightNormSparsifier(sparse_block_shape=(1, 1))
    mask = torch.ones(16, 16)
    mask[0] = 0
    dense = model[0].weight.detach().clone()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "parametrization": Doubled, "mask": mask}])
    assert model[0].parametrizations.weight[0].mask is sparsifier.state["0.weight"]["mask"] is mask
    assert torch.equal(model[0].weight.detach(), 2 * dense * mask)
    sparsifier.step()
    assert int((model[0].weight == 0).sum()) == 128
    assert not model[0].weight[0].any()  # pruned elements score lowest


@BOTH
def test_a_subclass_that_finds_other_layers(library):
    class Convolutions(library.NearlyDiagonalSparsifier):
        def make_config_from_model(self, model, SUPPORTED_MODULES=(nn.Conv2d,)):
            super().make_config_from_model(model, SUPPORTED_MODULES)

    sparsifier = Convolutions()
    sparsifier.prepare(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Linear(2, 2)), None)
    assert [g["tensor_fqn"] for g in sparsifier.groups] == ["0.weight"]


@BOTH
def test_a_scheduler_of_the_users_own(library):
    class Halving(library.BaseScheduler):
        def get_sl(self):
            if self.last_epoch > 0:
                return [group["sparsity_level"] * 0.5 for group in self.sparsifier.groups]
            return list(self.base_sl)

    _, sparsifier = prepared(library, sparsity_level=0.8)
    scheduler = Halving(sparsifier)
    sparsifier.enable_mask_update = False
    sparsifier.step()
    scheduler.step()
    assert scheduler.get_last_sl() == [0.4, 0.4]
    assert sparsifier.enable_mask_update


@BOTH
def test_a_mask_sparsifier_as_in_the_pruning_tutorial(library):
    """Prepares, trains with a cubic schedule and squashes; the result is a plain model with sparse weights."""
    model, sparsifier = net(), library.WeightNormSparsifier(sparsity_level=0.75)
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight", "sparsity_level": 0.5}])
    scheduler = library.CubicSL(sparsifier, delta_t=1, total_t=5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    for step in range(8):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        sparsifier.step()
        scheduler.step()
    sparsifier.squash_mask(params_to_keep=("sparse_block_shape",))
    assert [round(float((layer.weight == 0).float().mean()), 2) for layer in (model[0], model[2])] == [0.75, 0.5]
    net().load_state_dict(model.state_dict())
    assert model[0].sparse_params == {"sparse_block_shape": (1, 4)}


def test_a_squashed_model_is_a_dense_one():
    model, sparsifier = prepared()
    parameter = model[0].parametrizations.weight.original
    x = torch.randn(2, 16)
    wanted, memory = model(x), parameter.data_ptr()
    sparsifier.squash_mask()
    assert torch.equal(model(x), wanted)
    assert model[0].weight is parameter  # the same object, which optimizers hold
    assert parameter.data_ptr() == memory
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, nn.Linear]
    assert set(vars(model[0])) == set(vars(nn.Linear(1, 1)))


def test_a_mask_of_the_engine_is_written_where_a_loaded_one_has_another_dtype():
    model, sparsifier = prepared()
    mask = model[0].parametrizations.weight[0].mask
    mask.data = mask.to(torch.int8)
    sparsifier.groups[0]["sparsity_level"] = 0.75
    sparsifier.step()
    assert mask.dtype == torch.float32
    assert mask.mean() == 0.25


def test_tied_weights_stay_tied():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    sparsifier = ours.WeightNormSparsifier()
    sparsifier.prepare(model, None)
    sparsifier.step()
    assert model[0].parametrizations.weight.original is model[1].parametrizations.weight.original
    assert torch.equal(model[0].weight, model[1].weight)


def test_channels_last_and_transposed_weights():
    torch.manual_seed(0)
    convolution = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(convolution).to(memory_format=torch.contiguous_format)
    for layer in (convolution, twin):
        model, sparsifier = nn.Sequential(layer), ours.WeightNormSparsifier(zeros_per_block=2)
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
        sparsifier.step()
        sparsifier.step()
    assert torch.equal(convolution.weight, twin.weight)
    transposed = nn.Linear(8, 8)
    transposed.weight = nn.Parameter(torch.randn(8, 8).T)
    sparsifier = ours.WeightNormSparsifier()
    sparsifier.prepare(nn.Sequential(transposed), None)
    sparsifier.step()
    assert (transposed.weight == 0).float().mean() == 0.5


# --- compilers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_prepared_model_compiles_once_and_trains(backend):
    torch._dynamo.reset()
    model, sparsifier = prepared()
    twin, other = prepared()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, twin)]
    for level in (0.5, 0.75, 0.9):
        x = torch.randn(2, 16)
        with torch._dynamo.config.patch(error_on_recompile=True) if level > 0.5 else torch.enable_grad():
            for call, optimizer in zip((compiled, twin), optimizers, strict=True):
                optimizer.zero_grad()
                call(x).square().sum().backward()
                optimizer.step()
        for one in (sparsifier, other):
            for group in one.groups:
                group["sparsity_level"] = level
            one.step()
        torch.testing.assert_close(compiled(x), twin(x))
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")  # inductor's own
def test_a_prepared_model_compiles_with_inductor():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, sparsifier = nn.Sequential(nn.Linear(8, 8)), ours.WeightNormSparsifier()
    sparsifier.prepare(model, None)
    compiled, x = torch.compile(model, fullgraph=True), torch.randn(2, 8)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))
        sparsifier.step()
        torch.testing.assert_close(compiled(x), model(x))


def test_a_prepared_model_is_exported_saved_and_loaded():
    model, _ = prepared(zeros_per_block=2)
    x = torch.randn(3, 16)
    program = torch.export.export(model, (x,))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for loaded in (program, torch.export.load(file)):
        assert torch.equal(loaded.module()(x), model(x))
    assert list(program.state_dict) == list(model.state_dict())


@pytest.mark.filterwarnings("ignore")  # torch.jit's own
def test_a_prepared_model_is_traced_and_called_functionally():
    model, _ = prepared()
    x = torch.randn(3, 16)
    assert torch.equal(torch.jit.trace(model, (x,))(x), model(x))
    doubled = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    assert not torch.equal(torch.func.functional_call(model, doubled, (x,)), model(x))
    with parametrize.cached():
        assert model[0].weight is model[0].weight


def test_a_pickled_model_compiles_and_exports():
    torch._dynamo.reset()
    model, _ = prepared()
    new, x = pickle.loads(pickle.dumps(model)), torch.randn(3, 16)
    assert torch.equal(torch.compile(new, backend="eager", fullgraph=True)(x), model(x))
    assert torch.equal(torch.export.export(copy.deepcopy(new), (x,)).module()(x), model(x))


# --- quantization ---------------------------------------------------------------------------------------------------------


@contextmanager
def engine(wanted: str) -> Iterator[None]:
    if wanted not in torch.backends.quantized.supported_engines:
        pytest.skip(f"this torch has no {wanted}")
    before, torch.backends.quantized.engine = torch.backends.quantized.engine, wanted
    try:
        yield
    finally:
        torch.backends.quantized.engine = before


def sparse_model() -> tuple[nn.Sequential, Tensor]:
    model, sparsifier = prepared(ours, sparsity_level=0.5)
    sparsifier.squash_mask(params_to_keep=("sparse_block_shape",))
    return model, torch.randn(4, 16)


@pytest.mark.filterwarnings("ignore")  # torch.ao.quantization is deprecated
def test_dynamic_sparse_quantized_layers_come_close():
    with engine("qnnpack"):
        model, x = sparse_model()
        wanted = model(x)
        model.qconfig = quantization.default_dynamic_qconfig  # type: ignore[assignment]
        quantization.propagate_qconfig_(model)
        new = quantization.convert(model, mapping=ours.get_dynamic_sparse_quantized_mapping())
        assert type(new[0]) is torch.ao.nn.sparse.quantized.dynamic.Linear
        torch.testing.assert_close(new(x), wanted, atol=0.05, rtol=0)


@pytest.mark.filterwarnings("ignore")
def test_static_sparse_quantized_layers_come_close():
    with engine("fbgemm"):
        dense, x = sparse_model()
        wanted = dense(x)
        model = nn.Sequential(quantization.QuantStub(), *dense, quantization.DeQuantStub())
        model.qconfig = quantization.get_default_qconfig("fbgemm")  # type: ignore[assignment]
        quantization.prepare(model, inplace=True)
        model(x)
        mapping = quantization.get_default_static_quant_module_mappings() | ours.get_static_sparse_quantized_mapping()
        new = quantization.convert(model, mapping=mapping)
        assert type(new[1]) is torch.ao.nn.sparse.quantized.Linear
        torch.testing.assert_close(new(x), wanted, atol=0.1, rtol=0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", ["sparse", "quantized"])
def test_masks_go_through_quantization_aware_training(first):
    with engine("fbgemm"):
        model = nn.Sequential(quantization.QuantStub(), nn.Linear(16, 16), quantization.DeQuantStub())
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        sparsifier, config = ours.WeightNormSparsifier(), [{"tensor_fqn": "1.weight"}]
        if first == "sparse":
            sparsifier.prepare(model, config)
            quantization.prepare_qat(model, inplace=True)
        else:
            quantization.prepare_qat(model, inplace=True)
            sparsifier.prepare(model, config)
        sparsifier.step()
        model(torch.randn(4, 16)).sum().backward()
        sparsifier.squash_mask()
        quantization.convert(model, inplace=True)
        weight = model[1]._weight_bias()[0].dequantize()  # type: ignore[operator]
        assert (weight == 0).float().mean() >= 0.5
        model(torch.randn(4, 16))
