"""Compressed layers in unusual places: other dtypes, modes, transforms and inputs, and state dicts that do not fit."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from secateur.execute import Compressed, compress_, decompress_
from secateur.execute.formats import FORMATS

from .patterns import pruned

OPTIONS = {"tiled": (1,), "csr": (), "gather": (), "bitmask": ()}


def linear(form: str = "tiled") -> tuple[nn.Linear, Compressed]:
    layer = nn.Linear(40, 24).eval()
    with torch.no_grad():
        layer.weight.copy_(pruned(24, 40, "1x1", 0.7))
    return layer, Compressed(layer, FORMATS[form], OPTIONS[form]).eval()


def conv() -> tuple[nn.Conv2d, Compressed]:
    layer = nn.Conv2d(4, 8, 3, padding="same", groups=2).eval()
    return layer, Compressed(layer, FORMATS["tiled"], (1,)).eval()


def embedding(**more: object) -> tuple[nn.Embedding, Compressed]:
    layer = nn.Embedding(50, 12, **more).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        layer.weight.copy_(pruned(50, 12, "1x1", 0.7))
    return layer, Compressed(layer, FORMATS["bitmask"], ()).eval()


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", sorted(OPTIONS))
def test_gradients_and_their_gradients_come_through(form):
    dense, packed = linear(form)
    x, found = torch.randn(3, 40, requires_grad=True), []
    for layer in (dense, packed):
        first = torch.autograd.grad(layer(x).pow(3).sum(), [x, layer.bias], create_graph=True)
        found.append([*first, torch.autograd.grad(first[0].sum(), x)[0]])
    for one, other in zip(*found):
        close(one, other, 1e-3)


def test_numbers_that_are_no_row_are_refused():
    _, packed = embedding()
    for wrong in (-1, 50):
        with pytest.raises(IndexError, match=r"from 0 to 49 .*, got -?\d+ to"):
            packed(torch.tensor([3, wrong]))


def test_embedding_comes_back_with_all_its_settings():
    dense, packed = embedding(padding_idx=3, sparse=True, scale_grad_by_freq=True)
    assert repr(packed.restored()) == repr(dense)


def test_the_dense_layer_can_be_asked_for_its_sizes():
    assert (linear()[1].in_features, linear()[1].out_features) == (40, 24)
    assert (conv()[1].kernel_size, conv()[1].padding) == ((3, 3), "same")
    assert embedding(padding_idx=3)[1].padding_idx == 3


@pytest.mark.parametrize("grad", [False, True])
def test_autocast_gives_the_dtype_that_dense_layers_give(grad):
    image, x = torch.randn(2, 4, 9, 9), torch.randn(5, 40)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        for (dense, packed), seen in ((linear(), x), (conv(), image), (linear("csr"), x)):
            assert packed(seen).dtype == dense(seen).dtype == torch.bfloat16
            close(packed(seen).float(), dense(seen).float(), 5e-2)
        assert packed(x.double()).dtype == torch.float64
        assert embedding()[1](torch.arange(3)).dtype == torch.float32


def test_layers_made_in_inference_mode_work_outside_of_it():
    model = nn.Sequential(linear()[0])
    with torch.inference_mode():
        compress_(model, torch.randn(8, 40), objective="size")
    x = torch.randn(8, 40, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        decompress_(model)
    model(x).sum().backward()
    assert model[0].weight.grad is not None


def test_vmap_and_derivatives_of_functions():
    (dense, packed), x = linear(), torch.randn(5, 3, 40)
    close(torch.vmap(packed)(x), dense(x))
    close(torch.func.jacrev(packed)(x[0, 0]), dense.weight)
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            close(torch.vmap(packed, in_dims=1)(x), dense(x.transpose(0, 1)))
    (dense, packed), images = conv(), torch.randn(5, 2, 4, 6, 6)
    close(torch.vmap(packed)(images), torch.stack([dense(each) for each in images]))
    (dense, packed), ids = embedding(), torch.randint(50, (5, 3))
    close(torch.vmap(packed)(ids), dense(ids))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_taken(layout):
    dense, packed = linear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nested tensors are a prototype
        x = torch.nested.nested_tensor([torch.randn(2, 40), torch.randn(5, 40)], layout=layout)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                for one, other in zip(packed(x).unbind(), dense(x).unbind()):
                    close(one, other)


def test_tangents_come_through():
    (dense, packed), x = linear(), torch.randn(3, 40)
    with warnings.catch_warnings(), torch.no_grad(), forward_ad.dual_level():
        warnings.simplefilter("ignore")  # torch uses torch.jit internally, which warns that it is deprecated
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        close(forward_ad.unpack_dual(packed(dual)).tangent, forward_ad.unpack_dual(dense(dual)).tangent)


def test_views_that_only_say_minus_are_read_as_such():
    (dense, packed), x = linear(), torch.randn(3, 40, dtype=torch.cfloat).conj().imag
    assert x.is_neg()
    with torch.no_grad():
        close(packed(x), dense(x))


@pytest.mark.parametrize(("options", "pattern"), [((1, 0), "1x1"), ((1, 1), "2:4")])
def test_pairs_of_inputs_may_begin_anywhere(options, pattern):
    dense = nn.Linear(40, 24).bfloat16().eval()
    wide = torch.randn(5, 41).bfloat16()
    with torch.no_grad():
        dense.weight.copy_(pruned(24, 40, pattern, 0.5))
        packed = Compressed(dense, FORMATS["pairs"], options).eval()
        for x in (wide.flatten()[1:161].view(4, 40), wide[:1, :40], wide[3:4, :40], wide[:, 1:]):
            close(packed(x), dense(x), 5e-2)


def test_bias_may_lie_anywhere():
    dense = nn.Linear(40, 24).eval()
    dense.bias = nn.Parameter(torch.randn(48)[::2])
    for form, x in (("tiled", torch.randn(9, 40)), ("gather", torch.randn(1, 40))):
        with torch.no_grad():
            close(Compressed(dense, FORMATS[form], OPTIONS[form]).eval()(x), dense(x))


@pytest.mark.parametrize("form", sorted(OPTIONS))
def test_bias_of_another_size_is_spread_or_refused_as_by_the_dense_layer(form):
    (dense, packed), x = linear(form), torch.randn(3, 40)
    with torch.no_grad():
        one, few = {"bias": torch.randn(1)}, {"bias": torch.randn(23)}
        close(torch.func.functional_call(packed, one, x), torch.func.functional_call(dense, one, x))
        with pytest.raises(RuntimeError, match="expanded size"):
            torch.func.functional_call(packed, few, x)
        with pytest.raises(RuntimeError, match="expanded size"):
            torch.func.functional_call(conv()[1], {"bias": torch.randn(7)}, torch.randn(1, 4, 9, 9))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shape", [(), (39,), (2, 41)])
def test_inputs_of_another_width_are_refused_in_words(grad, shape):
    with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=r"40 features in the last dimension .*, got shape \("):
        linear()[1](torch.randn(shape))


def test_whole_numbers_are_refused_as_by_the_dense_layer():
    with torch.no_grad(), pytest.raises(RuntimeError):
        linear()[1](torch.ones(3, 40, dtype=torch.int64))


@pytest.mark.parametrize("form", sorted(OPTIONS))
def test_defaults_for_new_tensors_change_nothing(form):
    (dense, packed), x = linear(form), torch.randn(9, 40)
    with torch.no_grad():
        expected = dense(x)
        with torch.device("meta"):
            close(packed(x), expected)
            again = Compressed(dense, FORMATS[form], OPTIONS[form]).eval()
        close(again(x), expected)
        torch.set_default_dtype(torch.float64)
        try:
            close(packed(x), expected)
            close(Compressed(dense, FORMATS[form], OPTIONS[form]).eval()(x), expected)
        finally:
            torch.set_default_dtype(torch.float32)


def test_layer_that_is_elsewhere_raises_and_does_not_read_there():
    _, packed = linear()
    with torch.no_grad():
        with pytest.raises(RuntimeError):
            copy.deepcopy(packed).to("meta")(torch.randn(9, 40))
        packed.bias = nn.Parameter(torch.empty(24, device="meta"))
        with pytest.raises(RuntimeError, match="the bias is on meta"):
            packed(torch.randn(9, 40))


def test_buffers_that_do_not_fit_are_refused_and_nothing_is_loaded():
    layer = nn.Linear(64, 64)
    tall, flat = (Compressed(layer, FORMATS["tiled"], (height,)).eval() for height in (4, 1))
    state, x = {name: value.clone() for name, value in flat.state_dict().items()}, torch.randn(9, 64)
    short = {**state, "values": state["values"][:10]}
    other = {**state, "index": state["index"].int()}
    with torch.no_grad():
        expected = flat(x)
        for wrong in (tall.state_dict(), short, other):
            with pytest.raises(ValueError, match=r"buffers of this layer in the state dict .* format tiled 1 with 64x64"):
                flat.load_state_dict(wrong)
            assert torch.equal(flat(x), expected)
        flat.load_state_dict(state)
        assert torch.equal(flat(x), expected)


HELD = [
    ("tiled", (1,), "1x1"), ("tiled", (4,), "4x1"), ("pairs", (1, 0), "1x1"), ("pairs", (1, 1), "2:4"), ("gather", (), "1x1"),
    ("runs", (), "1x8"), ("panels", (8,), "8x1"), ("bitmask", (), "1x1"), ("csr", (), "1x1"), ("amx_tiles", (), "1x1"),
]  # fmt: skip


def held(form: str, options: tuple[int, ...], pattern: str, seed: int = 0, rows: int = 280, columns: int = 404) -> Compressed:
    layer = nn.Linear(columns, rows).to(torch.bfloat16 if form in ("pairs", "amx_tiles") else torch.float32)
    with torch.no_grad():
        layer.weight.copy_(pruned(rows, columns, pattern, 0.7, seed=seed))
    return Compressed(layer, FORMATS[form], options).eval()


def there_and_back(starts: torch.Tensor) -> torch.Tensor:
    """Moves the second start far ahead. torch itself would write past the end of memory when unpacking these."""
    starts.flatten()[1] += 100_000_000 if starts.dtype.itemsize > 2 else 7
    return starts


def copied(layer: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in layer.state_dict().items()}


@pytest.mark.parametrize(("form", "options", "pattern"), HELD)
def test_offsets_that_lead_elsewhere_are_refused(form, options, pattern):
    """Kernels use these numbers as addresses."""
    layer, told = held(form, options, pattern), r"buffers of .* in the state dict do not match the model"
    for name in {"starts", "used", "order", "index", "first", "counts", "masks"} & {*layer.names}:
        for change in (
            lambda t: t.add_(77),
            lambda t: t.neg_(),
            lambda t: t.roll(1),
            lambda t: t[:-1],
            lambda t: t[:1],
            there_and_back,
        ):
            state = copied(layer)
            state[name] = change(state[name])
            for given in (state, {name: state[name]}):  # all buffers, or a single one that replaces the layer's own
                if not torch.equal(state[name], layer.get_buffer(name)):
                    with pytest.raises(ValueError, match=told):
                        layer.load_state_dict(given, strict=False)
    state = copied(layer)
    few = {"tiled": options[:1], "pairs": options[:1], "bitmask": (17,), "csr": (1,), "amx_tiles": (1,)}.get(form, (8,))[0]
    state["values"] = state["values"][:few]  # torch would broadcast these to all entries
    with pytest.raises(ValueError, match=told):
        layer.load_state_dict(state)
    with pytest.raises(ValueError, match=told):
        copy.deepcopy(layer).to("meta").load_state_dict(
            {**copied(layer), "starts": layer.get_buffer("starts") + 9}, assign=True
        )


@pytest.mark.parametrize(("form", "options", "pattern"), HELD)
def test_buffers_of_other_zeros_are_taken(form, options, pattern):
    layer, other = (held(form, options, pattern, seed) for seed in (0, 1))
    x = torch.randn(3, 404).to(layer.dtype)
    with torch.no_grad():
        other.get_buffer("values").view(other.dtype)[:40] *= 1e-30  # these become zero in float16, but stay stored
        for given, assign in ((other, False), (copy.deepcopy(other).half(), False), (other, True)):
            state = {name: torch.stack([value, value], -1)[..., 0] for name, value in given.state_dict().items()}
            layer.load_state_dict(state, assign=assign)
            close(layer(x).float(), other(x).float(), 5e-2)
    assert layer.get_buffer("starts").is_contiguous()


@pytest.mark.parametrize("form", sorted(OPTIONS))
def test_layer_on_the_meta_device_takes_packed_and_dense_weights(form):
    (dense, packed), x = linear(form), torch.randn(1, 40)
    for state in (packed.state_dict(), dense.state_dict()):
        empty = copy.deepcopy(packed).to("meta")
        empty.load_state_dict(state, assign=True)
        with torch.no_grad():
            close(empty(x), dense(x))


def test_dense_layer_of_a_dtype_that_no_kernel_has():
    dense, packed = linear()
    with torch.no_grad():
        x = torch.randn(3, 40).double()
        close(copy.deepcopy(packed).double()(x), copy.deepcopy(dense).double()(x))


def test_what_else_a_layer_carries_comes_back_with_it():
    layer, called = nn.Linear(40, 24).eval(), []
    layer.label = "mine"  # type: ignore[assignment]
    layer.register_full_backward_hook(lambda *_: called.append("backward"))
    layer.register_state_dict_post_hook(lambda *_: called.append("state"))
    model = nn.Sequential(Compressed(layer, FORMATS["tiled"], (1,)))
    model(torch.randn(3, 40, requires_grad=True)).sum().backward()
    assert called == ["backward"]
    back = decompress_(copy.deepcopy(model))[0]  # type: ignore[index]
    back(torch.randn(3, 40, requires_grad=True)).sum().backward()
    back.state_dict()
    assert called == ["backward", "backward", "state"]
    assert back.label == "mine"


def test_layers_with_more_than_a_weight_stay_as_they_are():
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40)).eval()
    model[0].register_buffer("scale", torch.ones(1))
    model[1].forward = lambda x: x @ model[1].weight.t() + model[1].bias  # type: ignore[method-assign]
    with torch.no_grad():
        for layer in model:
            layer.weight.copy_(pruned(40, 40, "1x1", 0.9))  # type: ignore[operator, arg-type]
    before = list(model.state_dict())
    result = compress_(model, torch.randn(8, 40), objective="size")
    assert [row.reason for row in result.rows] == [
        "it holds more than weight and bias: scale",
        "its forward was replaced by another function",
    ]
    assert list(model.state_dict()) == before


def test_weight_that_the_format_cannot_hold_is_refused_by_name():
    layer = nn.Linear(8, 4).to(torch.bfloat16)
    with torch.no_grad():
        layer.weight[:, ::2] = 0
    model = nn.Sequential(Compressed(layer, FORMATS["pairs"], (1, 1)))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"0\.weight cannot be stored in the format pairs: .*decompress_"):
        model.load_state_dict({"0.weight": torch.ones(4, 8), "0.bias": torch.ones(4)})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
