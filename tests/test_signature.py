"""A call of an operator becomes plain data and can be made again from it."""

import json

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shoestring.signature import Signature, signature_of

aten = torch.ops.aten


def make_meta(shape, stride, dtype):
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def convolution(image, weight):
    rest = [None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1]
    return signature_of(aten.convolution.default, [image, weight, *rest])


def test_a_fake_and_a_real_call_have_the_same_signature():
    with FakeTensorMode():
        fake = convolution(torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3))
    assert fake == convolution(torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3))


def test_strides_and_types_tell_calls_apart():
    image, weight = torch.empty(2, 3, 8, 8), torch.empty(4, 3, 3, 3)
    plain = convolution(image, weight)
    assert plain != convolution(image.to(memory_format=torch.channels_last), weight)
    assert plain != convolution(image.half(), weight.half())
    assert len({plain, convolution(image, weight)}) == 1


def test_true_one_and_one_point_zero_are_different_arguments():
    assert len({signature_of("aten.add.Scalar", [value]) for value in (True, 1, 1.0)}) == 3


def test_a_signature_survives_json():
    call = signature_of(
        aten._to_copy.default,
        [torch.empty(4, 5).t()],
        {"dtype": torch.float16, "device": torch.device("cpu"), "memory_format": torch.preserve_format},
    )
    assert Signature.from_json(json.loads(json.dumps(call.to_json()))) == call


def test_the_call_can_be_made_again():
    call = signature_of(
        aten._to_copy.default, [torch.empty(4, 5).t()], {"dtype": torch.float16, "layout": torch.strided}
    )
    args, kwargs = call.call_arguments(make_meta)
    copy = call.function()(*args, **kwargs)
    assert (copy.shape, copy.stride(), copy.dtype) == ((5, 4), (1, 5), torch.float16)


def test_lists_of_tensors_are_written_down():
    call = signature_of(aten.cat.default, [[torch.empty(2, 3), torch.empty(4, 3)], 0])
    args, _ = call.call_arguments(make_meta)
    assert call.function()(*args).shape == (6, 3)


def test_infinite_numbers_come_back():
    call = signature_of(aten.masked_fill.Scalar, [torch.empty(2), torch.empty(2).bool(), float("-inf")])
    again = Signature.from_json(json.loads(json.dumps(call.to_json())))
    assert again == call and again.call_arguments(make_meta)[0][2] == float("-inf")


def test_an_argument_that_is_not_data_is_refused_when_called_and_not_before():
    call = signature_of(aten.rand.generator, [[2]], {"generator": torch.Generator()})
    with pytest.raises(ValueError, match="Generator"):
        call.call_arguments(make_meta)


def test_a_name_that_is_no_type_is_refused():
    call = Signature.from_json({"op": "aten.relu.default", "args": [{"dtype": "save"}]})
    with pytest.raises(ValueError, match="no dtype called 'save'"):
        call.call_arguments(make_meta)


@pytest.mark.parametrize("name", ["aten.no_such.default", "aten.relu.no", "aten.relu", "load_library", ""])
def test_only_an_operator_is_ever_called(name):
    with pytest.raises(ValueError, match="no operator called"):
        Signature(name, "{}").function()
