"""An outlined operator returns the shape, memory layout and dtype of the real operator."""

import pytest
import torch

from secateur.ops.shapes import Blank
from secateur.trace import Outlined, ValueRead

aten = torch.ops.aten
x = torch.randn
IMAGE, SOUND = x(2, 4, 9, 7), x(2, 4, 9)
VECTOR = torch.rand(4) + 1

CALLS = {
    "mm": (aten.mm.default, x(3, 4), x(4, 5)),
    "bmm": (aten.bmm.default, x(2, 3, 4), x(2, 4, 5)),
    "addmm": (aten.addmm.default, x(5), x(3, 4), x(4, 5)),
    "convolution": (aten.convolution.default, IMAGE, x(6, 2, 3, 3), None, [2, 1], [1, 0], [1, 2], False, [0, 0], 2),
    "transposed convolution": (aten.convolution.default, SOUND, x(4, 3, 3), x(6), [2], [1], [1], True, [1], 2),
    "batch norm": (aten.native_batch_norm.default, IMAGE, VECTOR, VECTOR, VECTOR, VECTOR, False, 0.1, 1e-5),
    "batch norm in training": (aten.native_batch_norm.default, IMAGE, VECTOR, None, VECTOR + 0, VECTOR + 0, True, 0.1, 1e-5),
    "max pool": (aten.max_pool2d_with_indices.default, IMAGE, [3, 3], [2, 2], [1, 1], [1, 1], False),
    "max pool, rounded up": (aten.max_pool2d_with_indices.default, IMAGE, [2, 2], [2, 2], [0, 0], [1, 1], True),
    "max pool, padded": (aten.max_pool2d_with_indices.default, IMAGE, [3], [4, 2], [1], [1, 1], True),
    "max pool, dilated": (aten.max_pool2d_with_indices.default, IMAGE, [3, 2], [1, 1], [1, 0], [2, 2]),
    "max pool without a batch": (aten.max_pool2d_with_indices.default, IMAGE[0], [2, 2]),
    "max pool of channels last": (aten.max_pool2d_with_indices.default, IMAGE.to(memory_format=torch.channels_last), [2, 2]),
}


@pytest.mark.parametrize("name", CALLS)
def test_outlined_result_has_shape_strides_and_dtype_of_the_real_one(name):
    func, *args = CALLS[name]
    made, real = Outlined()(func, args, {}), func(*args)
    for one, other in zip(made if isinstance(made, tuple) else (made,), real if isinstance(real, tuple) else (real,)):
        if other.numel():
            assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_wrong_shapes_raise_the_error_of_the_operator():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        Outlined()(aten.mm.default, (x(3, 4), x(5, 6)), {})
    with pytest.raises(RuntimeError, match="pad should be at most half"):
        Outlined()(aten.max_pool2d_with_indices.default, (IMAGE, [2, 2], [2, 2], [2, 2]), {})


def test_reading_a_value_that_was_not_computed_raises():
    outlined = Outlined()
    made, _ = outlined(aten.max_pool2d_with_indices.default, (IMAGE, [2, 2]), {})
    total = outlined(aten.sum.default, (made,), {})
    with pytest.raises(ValueRead, match="reads values"):
        outlined(aten._local_scalar_dense.default, (total,), {})


def test_batch_norm_in_training_is_not_computed():
    outlined = Outlined()
    made, *_ = outlined(aten.native_batch_norm.default, (IMAGE, VECTOR, VECTOR, VECTOR + 0, VECTOR + 0, True, 0.1, 1e-5), {})
    total = outlined(aten.sum.default, (made,), {})
    with pytest.raises(ValueRead, match="reads values"):
        outlined(aten._local_scalar_dense.default, (total,), {})


def test_blank_memory_of_other_devices_is_not_taken_on_the_host():
    shape = 1 << 22, 1 << 22
    assert Blank()(torch.empty(0, device="meta"), *shape).shape == shape
