"""A calibrated operator call needs the scratch that the meter then reads in a real run."""

import json

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from shoestring.errors import ShoestringError
from shoestring.measuring import calibration
from shoestring.measuring.allocator import measure_allocator
from shoestring.measuring.calibration import cache_path, calibrate, calibrated, load_cache, workspace_bytes
from shoestring.signature import Bound, Signature, output_key, signature_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Collect(TorchDispatchMode):
    """Writes the signature of every operator call down."""

    def __init__(self):
        super().__init__()
        self.signatures = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.signatures.append(signature_of(func, args, kwargs))
        return func(*args, **(kwargs or {}))


def relu(*shape):
    return signature_of(aten.relu.default, [torch.empty(shape, device="meta")])


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_scratch_of_a_convolution_is_predicted_forward_and_backward(memory_format):
    image = torch.rand(100, 32, 32, 32).contiguous(memory_format=memory_format).requires_grad_()
    weight = torch.rand(32, 32, 3, 3).contiguous(memory_format=memory_format).requires_grad_()

    def step():
        torch.nn.functional.conv2d(image, weight, padding=1).mean().backward()

    step()
    image.grad = weight.grad = None
    with Collect() as collected:
        step()
    table = calibrate(collected.signatures)
    image.grad = weight.grad = None
    reading = measure_allocator(step)
    assert max(table.values()) == pytest.approx(reading.workspace_peak_bytes, rel=0.1)
    if memory_format == torch.contiguous_format and torch.backends.mkldnn.is_available():
        assert max(table.values()) >= image.numel() * 4


@pytest.mark.parametrize("layer", ["layer_norm", "batch_norm", "lstm", "attention"])
def test_the_scratch_of_other_layers_is_predicted(layer):
    make = {
        "layer_norm": lambda: (torch.nn.LayerNorm(64), torch.rand(64, 32, 64)),
        "batch_norm": lambda: (torch.nn.BatchNorm2d(16), torch.rand(32, 16, 24, 24)),
        "lstm": lambda: (torch.nn.LSTM(32, 64), torch.rand(20, 8, 32)),
        "attention": lambda: (torch.nn.TransformerEncoderLayer(32, 4, 64), torch.rand(40, 8, 32)),
    }
    module, batch = make[layer]()
    batch.requires_grad_()

    def step():
        out = module(batch)
        (out[0] if isinstance(out, tuple) else out).mean().backward()

    step()
    with Collect() as collected:
        step()
    table = calibrate(collected.signatures)
    scratch = [table[str(call)] for call in collected.signatures]
    assert None not in scratch
    assert max(scratch) == pytest.approx(measure_allocator(step).workspace_peak_bytes, rel=0.1)


def lstm_call():
    module, batch = torch.nn.LSTM(32, 64), torch.rand(20, 8, 32)
    with Collect() as collected:
        module(batch)
    return next(call for call in collected.signatures if "rnn_layer" in call.op)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="the LSTM is oneDNN's")
def test_the_workspace_that_an_lstm_keeps_for_its_backward_pass_is_measured():
    call = lstm_call()
    args, kwargs = call.call_arguments(calibration._zeros)
    assert calibrate([call])[output_key(call, 3)] == call.function()(*args, **kwargs)[3].numel() > 0


def test_an_empty_argument_is_never_handed_to_an_operator():
    call = signature_of(aten.relu.default, [torch.empty(3, 0)])
    assert workspace_bytes(call) is None
    assert calibrate([call]) == {str(call): 0}


def test_a_prediction_is_asked_again_until_it_knows_all_of_its_calls():
    class Prediction:
        def __init__(self, table):
            self.signatures = [relu(3)] if str(relu(2)) not in table else [relu(3), relu(4)]
            self.signatures += [relu(2)] if table else []

        def with_scratch(self, table):
            return None

    assert calibrated(Prediction).signatures == [relu(3), relu(4), relu(2)]


def test_an_operator_without_scratch_needs_none():
    assert workspace_bytes(relu(100, 100)) == 0


def test_a_number_read_from_a_tensor_needs_none():
    call = signature_of(aten._local_scalar_dense.default, [torch.zeros(())])
    assert calibrate([call])[str(call)] == 0


def test_what_ran_before_does_not_change_a_result():
    maps, channels = [torch.empty(8, 4, 16, 16)] * 2, [torch.empty(4)] * 5
    arguments = [*maps, *channels, True, 1e-5, [True, True, True]]
    call = signature_of(aten.native_batch_norm_backward.default, arguments)
    alone = workspace_bytes(call)
    workspace_bytes(relu(1000))
    assert alone is not None and alone > 0
    assert workspace_bytes(call) == alone


@pytest.mark.parametrize(
    "call",
    [
        signature_of("aten.no_such_operator.default", []),
        signature_of(aten.mm.default, [torch.empty(2, 3), torch.empty(2, 3)]),
        signature_of(aten.rand.generator, [[2]], {"generator": torch.Generator()}),
        signature_of(aten.relu.default, ["not a tensor"]),
    ],
)
def test_a_call_that_cannot_be_made_is_unknown_and_asked_again_next_time(call):
    assert workspace_bytes(call) is None
    assert all(isinstance(size, Bound) for size in calibrate([call]).values())
    assert load_cache() == {}


def test_a_call_too_large_for_the_machine_is_unknown_and_not_tried():
    assert workspace_bytes(relu(2**40)) is None


def test_an_expanded_argument_needs_the_bytes_of_its_storage_only():
    gradient = torch.empty((), device="meta").expand(10**9, 10**6)
    assert calibration.argument_sizes(signature_of(aten.sum.default, [gradient])) == [4]


def test_the_random_numbers_of_the_caller_stay_as_they_were():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    workspace_bytes(signature_of(aten.native_dropout.default, [torch.empty(100), 0.5, True]))
    assert torch.equal(torch.rand(3), expected)


def test_a_calibration_inside_a_profile_is_refused_and_not_called_unknown():
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(ShoestringError, match="already running"):
        workspace_bytes(relu(3))


def test_progress_is_told_once_for_each_different_call():
    told = []
    calibrate([relu(2), relu(3), relu(2)], progress=lambda *progress: told.append(progress))
    assert told == [(1, 2), (2, 2)]


def test_a_known_call_is_not_made_again(monkeypatch):
    first = calibrate([relu(5), relu(6)])
    monkeypatch.setattr(calibration, "measure_call", lambda signature: {str(signature): 77})
    assert calibrate([relu(5), relu(6)]) == first
    assert calibrate([relu(5), relu(8)]) == {str(relu(5)): 0, str(relu(8)): 77}


def test_another_thread_count_or_onednn_setting_has_its_own_cache(monkeypatch):
    paths = {cache_path()}
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        paths.add(cache_path())
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    assert len(paths | {cache_path()}) == 3


def _with(record, **changes):
    return json.dumps(record | changes).encode()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[: len(content) // 2],
        lambda content: b"",
        lambda content: b"\xff\x00 no text",
        lambda content: b"[1, 2]",
        lambda content: _with(json.loads(content), workspace=[]),
        lambda content: _with(json.loads(content), workspace={"aten.relu.default": -1}),
        lambda content: _with(json.loads(content), workspace={"aten.relu.default": "many"}),
        lambda content: _with(json.loads(content), machine={"torch": "0.4"}),
        lambda content: _with(json.loads(content), version=1),
    ],
)
def test_a_damaged_cache_is_ignored_and_made_anew(damage):
    calibrate([relu(9)])
    sound = cache_path().read_bytes()
    cache_path().write_bytes(damage(sound))
    assert load_cache() == {}
    calibrate([relu(9)])
    assert cache_path().read_bytes() == sound


def test_an_interrupted_calibration_keeps_what_it_has():
    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate([relu(1), relu(2), relu(3)], progress=interrupt)
    assert set(load_cache()) == {str(relu(1)), str(relu(2))}


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch):
    blocked = tmp_path / "a file where the folder should be"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    assert calibrate([relu(4)]) == {str(relu(4)): 0}


def test_the_table_is_keyed_by_what_a_signature_from_json_says():
    again = Signature.from_json(json.loads(json.dumps(relu(4).to_json())))
    assert str(again) in calibrate([relu(4)])
