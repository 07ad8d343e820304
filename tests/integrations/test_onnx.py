"""ONNX files give in ONNX Runtime what the model gives in torch."""

import numpy as np
import pytest
import torch
from torch import nn

import secateur as sc

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.hidden = nn.Linear(8 * 36, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, images):
        return self.head(self.hidden(self.norm(self.conv(images)).relu().flatten(1)).relu())


@pytest.fixture
def images():
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def build():
    torch.manual_seed(0)
    return Net().eval()


def pruned(images):
    model = build()
    sc.prune_(model, sparsity=0.8)
    return model


def shrunk(images):
    return sc.shrink(build(), images, channels=0.5)[0].eval()


def compressed(images):
    model = pruned(images)
    assert sc.compress_(model, images, objective="size").compressed
    return model


def in_training(images):
    model = build()
    sc.Pruner(model, sparsity=0.5, ste=True).attach(torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def answers(path, *inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]
    return session.run(None, dict(zip(names, (each.numpy() for each in inputs), strict=True)))[0]


@pytest.mark.parametrize("make", [pruned, shrunk, compressed, in_training], ids=lambda make: make.__name__)
def test_onnx_runtime_gives_the_same_outputs(make, images, tmp_path):
    model = make(images)
    with torch.no_grad():
        expected = model(images)
    modes = [module.training for module in model.modules()]
    path = sc.to_onnx(model, images, tmp_path / "model.onnx")
    np.testing.assert_allclose(answers(path, images), expected, rtol=1e-4, atol=1e-5)
    assert [module.training for module in model.modules()] == modes
    with torch.no_grad():
        assert torch.equal(model(images), expected)  # the model is as it was, compressed layers included


def test_the_batch_size_can_be_dynamic(images, tmp_path):
    model = pruned(images)
    path = sc.to_onnx(model, images, tmp_path / "model.onnx", dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    more = torch.cat([images, images, images])
    with torch.no_grad():
        np.testing.assert_allclose(answers(path, more), model(more), rtol=1e-4, atol=1e-5)


def test_the_zeros_are_in_the_file(images, tmp_path):
    import onnx

    model = compressed(images)
    stored = onnx.load(sc.to_onnx(model, images, tmp_path / "model.onnx"))
    weights = [onnx.numpy_helper.to_array(one) for one in stored.graph.initializer]
    zeros = sum(int((one == 0).sum()) for one in weights if one.ndim > 1)
    assert zeros >= sum(layer.zeros for layer in sc.summary(model).layers)


def test_torch_onnx_export_of_a_compressed_model_names_decompress(images, tmp_path):
    with pytest.raises(torch.onnx.OnnxExporterError, match=r"secateur\.decompress_\(model\).*secateur\.to_onnx"):
        torch.onnx.export(compressed(images), (images,), tmp_path / "model.onnx", dynamo=True)
