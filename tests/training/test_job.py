from dataclasses import replace

import pytest
import torch

from shoestring import Adam, Plan, Task, builtin
from shoestring.data import open_images, open_pairs
from shoestring.errors import ShoestringError
from shoestring.models.dynamicconv import DynamicConvTransformer, Settings
from shoestring.models.translation import count_target_tokens, translation_loss
from shoestring.passes.mode import current_mode
from shoestring.training.job import CrossEntropy, ids_in, image_job, largest, pair_job, takes_images, tuned
from shoestring.training.loop import train


@pytest.fixture(scope="module")
def pairs():
    return open_pairs()


def translation(pairs, **changes):
    small = {"width": 16, "hidden": 16, "heads": 2, "encoder_kernels": (3,), "decoder_kernels": (3,)}
    still = {"dropout": 0.0, "weight_dropout": 0.0, "attention_dropout": 0.0}
    torch.manual_seed(0)
    model = DynamicConvTransformer(Settings(len(pairs.source), len(pairs.target), **small, **still))
    task = Task(model, translation_loss, None, Adam(), items=count_target_tokens, name="translation")
    return pair_job(task, pairs, tokens=300, seed=1, longest=1024, **changes)


def test_a_batch_of_sentences_trains_the_same_in_microbatches_of_tokens(pairs):
    losses = []
    for plan in (Plan(), Plan(microbatch=60)):
        lean, data, *_ = translation(pairs).build(plan)
        batch = data.read(0, 3)
        assert len(batch) > 1 or plan.microbatch is None
        losses.append([float(lean.step(batch)), float(lean.step(batch))])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_example_batch_is_the_largest_so_that_a_prediction_covers_all(pairs):
    data = translation(pairs).build(Plan(microbatch=100)).data
    found = max(map(ids_in, largest(data)))
    assert all(ids_in(piece) <= found for number in range(len(data)) for piece in data.read(0, number))


def test_translations_are_judged_by_validation_loss_or_bleu(pairs):
    job = translation(pairs)
    session = job.build(Plan(microbatch=100))
    record = train(session.lean, session.data, updates=20, evaluation=session.evaluation)
    assert record.quality_name == "loss" and not session.evaluation.higher and 1 < record.quality < 6
    pytest.importorskip("sacrebleu")
    judged = translation(pairs, quality="bleu").build(Plan())
    assert judged.evaluation.name == "BLEU" and judged.evaluation.higher


def test_16_bit_models_translate_under_their_contexts(pairs, monkeypatch):
    pytest.importorskip("sacrebleu")
    seen = []

    def translate(model, sentences, vocabulary, **settings):
        seen.append(current_mode())  # fails outside one: products of 16 bits would be PyTorch's, tens of times slower
        return ["word"] * len(sentences)

    monkeypatch.setattr("shoestring.training.job.translate", translate)
    session = translation(pairs, quality="bleu").build(Plan(precision="fp16"))
    assert session.evaluation(session.lean.model) == 0 and seen


def test_a_plan_by_sentences_becomes_one_by_tokens_that_holds_as_many(pairs):
    job = translation(pairs)
    length = max(part.shape[1] for part in job.task.batch)
    assert job.plan_in_tokens(Plan(microbatch=20)).microbatch == 20 * length and job.plan_in_tokens(Plan()) == Plan()
    small = job.plan_in_tokens(Plan(microbatch=1))  # a long sentence needs more than one of the example batch's
    assert small.microbatch == max(split.target.lengths().max() for split in (pairs.train, pairs.valid))
    assert len(job.build(small).data.read(0, 0)) > 1


def images_task(batch=10):
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10))
    return Task(model, CrossEntropy(), (torch.zeros(batch, 3, 32, 32), torch.zeros(batch).long()), Adam())


def test_images_reach_the_model_as_floats_a_microbatch_at_a_time():
    seen = []
    task = images_task()
    task.model.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    job = image_job(task, open_images(channels=3), seed=0)
    lean, data, *_ = job.build(Plan(microbatch=4))
    assert data.read(0, 0)[0].dtype == torch.uint8
    seen.clear()
    lean.step(data.read(0, 0))
    assert [(len(images), images.dtype) for images in seen] == [(n, torch.float32) for n in (4, 4, 2)]


@pytest.mark.parametrize(
    ("plan", "lr"),
    [(Plan(), 0.05), (Plan(nonzero=30), 0.1), (Plan(nonzero={"nonzero": 10, "method": "set"}), 0.05)],
)
def test_built_in_networks_train_at_the_learning_rates_of_the_paper(plan, lr):
    """Table 6: half the usual rate for the dense WRN-28-2 and at 10%, the whole of it at 30%."""
    task = builtin("wrn-28-2", batch=10, device="meta")
    job = replace(image_job(task, open_images(channels=3), seed=0), multiplier=tuned("wrn-28-2"))
    assert job.build(plan).lean.stepper.optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_smoothed_labels_cost_a_sure_model_more():
    task = images_task()
    sure = torch.nn.Module()
    sure.forward = lambda images: 20.0 * torch.eye(10)[:4]
    batch = torch.zeros(4, 3, 32, 32), torch.arange(4)
    assert CrossEntropy(0.1)(sure, batch) > CrossEntropy()(sure, batch) + 0.5
    assert takes_images(task) and not takes_images(task.with_(batch=torch.zeros(3)))


def test_images_of_another_shape_are_refused():
    task = images_task().with_(batch=(torch.zeros(2, 3, 64, 64), torch.zeros(2).long()))
    with pytest.raises(ShoestringError, match=r"images of \(3, 32, 32\).* the model takes \(3, 64, 64\)"):
        image_job(task, open_images(channels=3), seed=0)
