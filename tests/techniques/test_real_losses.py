"""Losses of transformers' own models: which of them are the sum of their microbatches, and by which count."""

import pytest
import torch
from runs import distance, doubled, run

from shoestring import SGD, Plan, ShoestringError, Task, apply
from shoestring.techniques import microbatch
from shoestring.techniques.microbatch import verdict
from shoestring.techniques.technique import Risk

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = pytest.mark.slow  # importing transformers alone takes ten seconds

SMALL = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 64}


def output(model, batch):
    return model(**batch)  # an output object that has the loss


def sentences(examples=8, length=24):
    """A tokenizer's batch: sentences of several lengths, whose padding is -100 in the labels."""
    torch.manual_seed(1)
    ids, lengths = torch.randint(3, 95, (examples, length)), torch.randint(3, length + 1, (examples, 1))
    mask = (torch.arange(length) < lengths).long()
    labels = ids.masked_fill(mask == 0, -100)
    return transformers.BatchEncoding({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})


def pictures_and_words():
    torch.manual_seed(1)
    words, pictures = torch.randint(3, 95, (8, 12)), torch.randn(8, 3, 32, 32)
    return transformers.BatchFeature({"input_ids": words, "pixel_values": pictures, "return_loss": True})


def speech():
    torch.manual_seed(1)
    labels = torch.randint(1, 20, (6, 8))
    labels[0, 4:] = labels[3, 2:] = -100
    return transformers.BatchFeature({"input_values": torch.randn(6, 800), "labels": labels})


def gpt2():
    config = transformers.GPT2Config(vocab_size=96, n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1,
                                     eos_token_id=2)  # fmt: skip
    return transformers.GPT2LMHeadModel(config), sentences()


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)), sentences()


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)), sentences()


def t5():
    config = transformers.T5Config(vocab_size=96, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
                                   decoder_start_token_id=0)  # fmt: skip
    return transformers.T5ForConditionalGeneration(config), sentences()


def clip():
    text = SMALL | {"max_position_embeddings": 32, "eos_token_id": 95, "bos_token_id": 1}
    vision = {name: value for name, value in SMALL.items() if name != "vocab_size"}
    vision |= {"image_size": 32, "patch_size": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return transformers.CLIPModel(config), pictures_and_words()


def wav2vec2(reduction="sum"):
    layers = {"conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    others = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0}
    config = transformers.Wav2Vec2Config(**SMALL | {"vocab_size": 20}, **layers, **others, ctc_loss_reduction=reduction)
    return transformers.Wav2Vec2ForCTC(config), speech()


def task(make, **changes):
    torch.manual_seed(0)
    model, batch = make()
    for module in model.modules():  # of which whole batches and pieces would draw others
        for name in ("p", "dropout", "attention_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return Task(model.train(), output, batch, SGD(lr=0.0), **changes)


def off(found):
    """By how much the gradient of microbatches of 3 is off that of the batch, in FP64."""
    found = doubled(found)
    pieces = apply(found, Plan(microbatch=3)).task
    return distance(run(pieces, 1).gradients[0], run(found, 1).gradients[0])


@pytest.mark.parametrize(
    "make, count",
    [
        (gpt2, "entries of 'labels' that are not -100, without the first of each row"),
        (llama, "entries of 'labels' that are not -100, without the first of each row"),
        (bert, "None"),
        (t5, "None"),
        (lambda: wav2vec2("mean"), "examples"),
    ],
    ids=["gpt2", "llama", "bert", "t5", "wav2vec2"],
)
def test_means_over_tokens_or_examples_are_found_and_exact(make, count):
    found = task(make)
    assert verdict(found).adds_up and str(verdict(found).items) == count
    assert microbatch.risk(found, 3) == Risk.EXACT
    assert off(found) < 1e-10


def test_a_sum_is_told_and_exact_when_it_is_said():
    with pytest.raises(ShoestringError, match=r'in the mean, but their sum: pass Task\(reduction="sum"\)'):
        apply(task(wav2vec2), Plan(microbatch=3))
    assert off(task(wav2vec2, reduction="sum")) < 1e-10


def test_in_batch_negatives_are_refused():
    found = task(clip)
    for use in (microbatch.options, lambda task: apply(task, Plan(microbatch=4))):
        with pytest.raises(ShoestringError, match="do not add up to the batch"):
            use(found)
