"""The DynamicConv Transformer: the recipe's size, exact causality, and padding that changes nothing."""

import copy

import pytest
import torch

from shoestring import ShoestringError, builtin
from shoestring.models.dynamicconv import PAD, DynamicConv, DynamicConvTransformer, Settings, dynamic_convolution
from shoestring.models.translation import TRANSLATION_ADAM, count_target_tokens, random_pairs, translation_loss
from shoestring.step import Stepper
from shoestring.task import Adam, Task

TINY = Settings(50, 40, 16, 32, heads=2, encoder_kernels=(3, 7), decoder_kernels=(3, 5), most_positions=64)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return DynamicConvTransformer(TINY).eval()


def pairs(tokens=40, lengths=(4, 9)):
    return random_pairs(torch.Generator().manual_seed(1), tokens, lengths, TINY)


def test_the_iwslt_recipe_has_exactly_38685184_parameters():
    model = builtin("dynamicconv-iwslt", tokens=100, device="meta").model
    assert sum(p.numel() for p in model.parameters()) == 38_685_184
    kernels = sum(m.kernels.weight.numel() for m in model.modules() if isinstance(m, DynamicConv))
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert (matrices - kernels) / 38_685_184 == pytest.approx(0.9838, abs=5e-5)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (7, 6)


@pytest.mark.parametrize("length, size, left", [(9, 5, 4), (9, 5, 2), (3, 7, 6), (3, 7, 3), (1, 1, 0)])
def test_the_band_matrix_gives_the_sum_over_the_kernel(length, size, left):
    x, kernels = torch.randn(2, length, 3), torch.randn(2, length, size)
    expected = torch.zeros_like(x)
    for t in range(length):
        for k in range(size):
            if 0 <= t + k - left < length:
                expected[:, t] += kernels[:, t, k, None] * x[:, t + k - left]
    torch.testing.assert_close(dynamic_convolution(x, kernels, left), expected)


def test_a_layer_with_equal_kernel_weights_is_a_moving_average():
    layer = DynamicConv(4, size=3, heads=2, causal=True, dropout=0.0)
    torch.nn.init.zeros_(layer.kernels.weight)
    x = torch.randn(1, 5, 4)
    torch.testing.assert_close(layer(x)[:, 2:], (x[:, :-2] + x[:, 1:-1] + x[:, 2:]) / 3)


@pytest.mark.parametrize("dtype, error", [(torch.float16, 4e-3), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("causal", [True, False])
def test_in_16_bits_a_layer_without_a_band_matrix_gives_the_same(causal, dtype, error):
    wide = DynamicConv(16, size=5, heads=2, causal=causal, dropout=0.0)
    x = torch.randn(2, 9, 16)
    results = []
    for kind in (torch.float32, dtype):
        layer, values = copy.deepcopy(wide).to(kind), x.to(kind, copy=True).requires_grad_()
        out = layer(values)
        out.float().square().sum().backward()
        results.append([t.float() for t in (out, values.grad, layer.kernels.weight.grad)])
    for found, wanted in zip(*results, strict=True):
        assert (found - wanted).abs().max() < error * wanted.abs().max()


def test_every_head_has_its_own_kernel_and_channels():
    layer = DynamicConv(4, size=3, heads=2, causal=True, dropout=0.0)
    x = torch.randn(1, 5, 4)
    kernels = layer.kernels(x).view(1, 5, 2, 3).softmax(3)
    for head, channels in enumerate((slice(0, 2), slice(2, 4))):
        expected = dynamic_convolution(x[:, :, channels], kernels[:, :, head], 2)
        torch.testing.assert_close(layer(x)[:, :, channels], expected)


def test_a_later_target_word_never_changes_an_earlier_score(model):
    source, target, _ = pairs()
    before = model(source, target)
    for place in range(1, target.shape[1]):
        changed = target.clone()
        changed[:, place:] = 7
        after = model(source, changed)
        assert torch.equal(after[:, :place], before[:, :place])
        assert not torch.equal(after[:, place], before[:, place])


def test_encoder_sees_both_sides(model):
    source = torch.randint(4, 50, (1, 9))
    before = model.encode(source).states
    source[:, 5] = 4 if source[0, 5] != 4 else 5
    after = model.encode(source).states
    assert not torch.equal(after[:, 4], before[:, 4])
    assert not torch.equal(after[:, 6], before[:, 6])


def test_padding_never_changes_scores_or_loss(model):
    source, target_in, target_out = pairs(7, (7, 7))
    padded = [torch.nn.functional.pad(ids, (0, 5), value=PAD) for ids in (source, target_in, target_out)]
    scores = model(*padded[:2])[:, : target_in.shape[1]]
    torch.testing.assert_close(scores, model(source, target_in), rtol=1e-5, atol=1e-5)
    loss = translation_loss(model, (source, target_in, target_out))
    torch.testing.assert_close(translation_loss(model, tuple(padded)), loss, rtol=1e-5, atol=1e-5)


def test_a_sentence_scores_the_same_alone_as_in_a_batch(model):
    source, target, out = pairs()
    together = model(source, target)
    for row in range(len(source)):
        words, read = (source[row] != PAD).sum(), (out[row] != PAD).sum()
        alone = model(source[row : row + 1, :words], target[row : row + 1, :read])
        torch.testing.assert_close(together[row : row + 1, :read], alone, rtol=1e-5, atol=1e-5)


def test_a_search_can_decode_word_by_word(model):
    source, target, _ = pairs(12, (6, 6))
    whole, memory = model(source, target), model.encode(source)
    for length in range(1, target.shape[1] + 1):
        torch.testing.assert_close(model.decode(target[:, :length], memory)[:, -1], whole[:, length - 1])


def test_losses_of_two_halves_weighted_by_their_words_make_the_loss_of_the_whole(model):
    batch = pairs()
    halves = [tuple(part[half] for part in batch) for half in (slice(0, 2), slice(2, None))]
    parts = sum(translation_loss(model, half) * count_target_tokens(half) for half in halves)
    torch.testing.assert_close(parts / count_target_tokens(batch), translation_loss(model, batch))


def test_the_loss_is_the_smoothed_cross_entropy_of_the_words(model):
    batch = pairs()
    log_probabilities = model(batch[0], batch[1]).log_softmax(2)
    right = log_probabilities.gather(2, batch[2][:, :, None]).squeeze(2)
    each = 0.9 * right + 0.1 * log_probabilities.mean(2)
    torch.testing.assert_close(translation_loss(model, batch), -each[batch[2] != PAD].mean())


def test_the_padding_word_stays_zero_and_is_not_trained(model):
    assert model.encoder.embed.tokens.weight[PAD].abs().max() == 0
    translation_loss(model, pairs()).backward()
    assert model.encoder.embed.tokens.weight.grad[PAD].abs().max() == 0
    model.zero_grad()


def test_the_loss_falls_over_a_few_steps():
    torch.manual_seed(0)
    batch = pairs()
    adam = Adam(lr=1e-2, betas=TRANSLATION_ADAM.betas)
    stepper = Stepper(Task(DynamicConvTransformer(TINY), translation_loss, batch, adam, count_target_tokens))
    losses = [stepper.step(batch).item() for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]


def test_a_sentence_longer_than_the_position_table_is_refused(model):
    with pytest.raises(ShoestringError, match="65 tokens does not fit the model's 64 positions"):
        model.encode(torch.full((1, 65), 5))


def test_heads_that_do_not_divide_the_width_are_refused():
    with pytest.raises(ShoestringError, match="width 10 must be even and a multiple of the 4 heads"):
        Settings(width=10, heads=4)


@pytest.mark.parametrize("length", [1, 2, 12])
def test_decoding_with_a_past_gives_the_scores_of_the_whole_target(model, length):
    source, target, _ = pairs(lengths=(length, length + 1))
    with torch.no_grad():
        memory, past = model.encode(source), model.past()
        steps = [model.decode(target[:, at : at + 1], memory, past) for at in range(target.shape[1])]
        torch.testing.assert_close(torch.cat(steps, 1), model.decode(target, memory), atol=1e-5, rtol=1e-5)


def test_a_past_goes_on_from_the_rows_that_a_search_keeps(model):
    source, target, _ = pairs(lengths=(8, 9))
    source, target = source[:1].expand(3, -1), torch.stack([target[0], target[0].roll(1), target[0].roll(2)])
    rows, memory = torch.tensor([2, 0, 0]), model.encode(source)
    with torch.no_grad():
        past = model.past()
        for at in range(4):
            model.decode(target[:, at : at + 1], memory, past)
        past.take(rows)
        other = torch.cat([target[rows, :4], target[:, 4:5]], 1)
        found = model.decode(other[:, 4:], memory, past)
        torch.testing.assert_close(found[:, 0], model.decode(other, memory)[:, -1], atol=1e-5, rtol=1e-5)
