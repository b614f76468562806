"""Hugging Face's Trainer with a budget: the same training, inside it, with all that the Trainer does around it."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")

from shoestring import Plan, ShoestringError  # noqa: E402
from shoestring.integrations import guest  # noqa: E402
from shoestring.integrations.huggingface import LeanMixin, LeanTrainer  # noqa: E402

VOCABULARY = 64


def gpt2(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    drop = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, **drop, bos_token_id=0, eos_token_id=0, **changes)
    )


def sentences(count=24, length=12):
    """Labels are ignored unevenly, so that the loss of a batch is not the mean of those of its parts."""
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (count, length))
    labels = [
        row.clone().index_fill_(0, torch.arange(number % 9 * length // 12), -100) for number, row in enumerate(ids)
    ]
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def arguments(folder, **changes):
    usual = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
    }
    quiet = {"disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "warmup_steps": 2, "weight_decay": 0.1}
    return transformers.TrainingArguments(str(folder), **(usual | quiet | changes))


def trained(kind, folder, model=None, how=None, resume=None, **changes):
    trainer = kind(model or gpt2(), arguments(folder, **changes), train_dataset=sentences(), **(how or {}))
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer):
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def same_weights(one, other, **tolerance):
    torch.testing.assert_close(one.model.state_dict(), other.model.state_dict(), **tolerance)


EXACTLY = {"rtol": 0, "atol": 0}


@pytest.fixture
def a_small_meter(monkeypatch):
    """So that steps are measured in budgets of a few MB, of which the real meter would be the larger part."""
    monkeypatch.setattr(guest, "meter_room", lambda limit: 0)


# -- the same training ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes", [
    {},
    {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 4, "max_steps": -1, "num_train_epochs": 1},  # 6 batches: the last update has 2
    {"max_grad_norm": 0.0, "lr_scheduler_type": "cosine", "optim": "sgd", "optim_args": "momentum=0.9"},
], ids=["plain", "accumulated", "remainder", "unclipped"])  # fmt: skip
def test_where_everything_fits_it_is_the_trainers_training_to_the_bit(tmp_path, changes):
    theirs = trained(transformers.Trainer, tmp_path, **changes)
    ours = trained(LeanTrainer, tmp_path, how={"plan": Plan()}, **changes)
    same_weights(theirs, ours, **EXACTLY)
    told = ("loss", "grad_norm", "learning_rate")
    for old, new in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        assert {key: old[key] for key in told if key in old} == {key: new[key] for key in told if key in new}


class MeanOfABatch(nn.Module):
    """A model that takes no num_items_in_batch: its loss is the mean over a batch's examples."""

    def __init__(self, width=32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Embedding(VOCABULARY, width), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, VOCABULARY)
        )

    def forward(self, input_ids, labels):
        return {"loss": nn.functional.cross_entropy(self.layers(input_ids[:, 0]), input_ids[:, 1])}


def summed(outputs, labels, num_items_in_batch=None):
    scores, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return nn.functional.cross_entropy(scores, wanted, ignore_index=-100, reduction="sum") / num_items_in_batch


class Squared(transformers.Trainer):
    """A trainer with a loss of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        loss = outputs.logits.square().mean()
        return (loss, outputs) if return_outputs else loss


class LeanSquared(LeanMixin, Squared):
    pass


LOSSES = {
    "tokens of all batches": ({}, {}, gpt2, (transformers.Trainer, LeanTrainer)),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}, gpt2, (transformers.Trainer, LeanTrainer)),
    "a function": ({}, {"compute_loss_func": summed}, gpt2, (transformers.Trainer, LeanTrainer)),
    "a mean": ({}, {}, MeanOfABatch, (transformers.Trainer, LeanTrainer)),
    "a trainer's own": ({}, {}, gpt2, (Squared, LeanSquared)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_microbatches_of_a_batch_add_up_to_the_trainers_loss(tmp_path, loss):
    """Through the losses that a Trainer knows, also where each is divided by the tokens of all batches of an update."""
    changes, how, model, (plain, lean) = LOSSES[loss]
    changes = changes | {"gradient_accumulation_steps": 2, "optim": "sgd", "max_steps": 2}
    theirs = trained(plain, tmp_path, model(), how, **changes)
    ours = trained(lean, tmp_path, model(), how | {"plan": Plan(microbatch=3)}, **changes)
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    same_weights(theirs, ours, rtol=1e-4, atol=1e-6)


def test_a_loss_whose_pieces_do_not_add_up_is_refused_in_microbatches(tmp_path):
    class Contrastive(LeanTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            pooled = model(input_ids=inputs["input_ids"]).logits.mean(1)
            return nn.functional.cross_entropy(pooled @ pooled.T, torch.arange(len(pooled)))

    with pytest.raises(ShoestringError, match="do not add up"):
        trained(Contrastive, tmp_path, how={"plan": Plan(microbatch=2)})


@pytest.mark.parametrize("plan", [
    Plan(optimizer="8bit"), Plan(precision="fp16", microbatch=2), Plan(checkpoint="every-4"),
    Plan(nonzero=50), Plan(optimizer="no-gradient"),
], ids=lambda plan: "-".join(plan.techniques()))  # fmt: skip
def test_a_plan_trains_nearly_as_the_trainer_does(tmp_path, plan):
    clip = {"max_grad_norm": 0.0} if plan.optimizer == "no-gradient" else {}
    theirs = trained(transformers.Trainer, tmp_path, max_steps=6, **clip)
    ours = trained(LeanTrainer, tmp_path, how={"plan": plan}, max_steps=6, **clip)
    assert losses(ours) == pytest.approx(losses(theirs), rel=0.02)


# -- the budget ----------------------------------------------------------------------------------------------------
def test_a_budget_is_planned_for_from_the_first_batch_and_what_is_predicted_is_measured(tmp_path, a_small_meter):
    changes = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 2}
    free = trained(LeanTrainer, tmp_path, MeanOfABatch(256), {"plan": Plan()}, **changes)
    plain = free.guest.metrics()
    assert plain["mem/predicted_bytes"] == pytest.approx(plain["mem/peak_bytes"], rel=0.01)
    budget = round(0.8 * plain["mem/peak_bytes"])
    lean = trained(LeanTrainer, tmp_path, MeanOfABatch(256), {"budget": budget}, **changes)
    last = [line for line in lean.state.log_history if "loss" in line][-1]
    assert lean.guest.lean.plan.techniques() and last["mem/budget_bytes"] == budget
    assert last["mem/peak_bytes"] <= budget
    assert last["mem/predicted_bytes"] == pytest.approx(last["mem/peak_bytes"], rel=0.01)


class InOrder(LeanTrainer):
    def _get_train_sampler(self, *args):
        return torch.utils.data.SequentialSampler(self.train_dataset)


@pytest.mark.parametrize("steps", [1, 3])
def test_batches_that_the_trainer_holds_beside_the_one_that_runs_are_in_the_budget(tmp_path, steps):
    """All of an update, and the one that its loader has fetched ahead."""
    changes = {"gradient_accumulation_steps": steps, "max_steps": 1}
    lean = trained(LeanTrainer, tmp_path, MeanOfABatch(), {"plan": Plan(), "budget": "1GB"}, **changes)
    one = 2 * 4 * 12 * 8  # ids and labels of 4 sentences of 12 tokens
    told, alone = lean.guest.metrics()["mem/predicted_bytes"], lean.guest.lean.plan.predicted_peak_bytes
    assert told - alone == lean.guest.fetched_bytes == steps * one


def test_a_later_batch_that_is_larger_goes_in_smaller_microbatches(tmp_path, caplog, a_small_meter):
    how = {"train_dataset": [*sentences(4, length=6), *sentences(4, length=20)], "plan": Plan(microbatch=3)}
    free = InOrder(gpt2(), arguments(tmp_path, max_steps=1), **how)
    free.train()
    budget = round(1.25 * free.guest.metrics()["mem/predicted_bytes"])
    lean = InOrder(gpt2(), arguments(tmp_path, max_steps=2), budget=budget, **how)
    lean.train()
    assert lean.guest.lean.plan.microbatch < 3 and "over the budget" in caplog.text
    assert lean.guest.metrics()["mem/peak_bytes"] <= budget


# -- around the step -----------------------------------------------------------------------------------------------
PLANS = {
    "8bit": Plan(optimizer="8bit"),
    "fp16": Plan(precision="fp16", microbatch=2),
    "sparse": Plan(nonzero={"nonzero": 50, "updates": 8, "frequency_multiplier": 400}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_checkpoint_is_a_plain_one_and_a_run_resumes_from_it_to_the_same_bits(tmp_path, plan):
    how, changes = {"plan": PLANS[plan]}, {"max_steps": 6, "save_strategy": "steps", "save_steps": 3}
    through = trained(LeanTrainer, tmp_path / "through", how=how, **changes)
    checkpoint = tmp_path / "through" / "checkpoint-3"
    again = trained(LeanTrainer, tmp_path / "again", how={"budget": "1GB"}, resume=str(checkpoint), **changes)
    assert again.guest.lean.plan.techniques() == PLANS[plan].techniques()  # the checkpoint's
    assert losses(again) == losses(through)
    same_weights(through, again, **EXACTLY)
    end = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "through" / "checkpoint-6").float()
    assert all(type(module).__module__.startswith(("torch.", "transformers.")) for module in end.modules())
    ids = sentences(2)[0]["input_ids"][None]
    torch.testing.assert_close(end(ids).logits, through.model.eval()(ids).logits.float(), rtol=1e-2, atol=1e-2)


def test_a_checkpoint_of_a_plain_trainer_is_resumed_under_a_new_plan(tmp_path):
    changes = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    through = trained(transformers.Trainer, tmp_path / "plain", **changes)
    checkpoint = str(tmp_path / "plain" / "checkpoint-2")
    lean = trained(LeanTrainer, tmp_path / "lean", how={"budget": "1GB"}, resume=checkpoint, **changes)
    same_weights(through, lean, **EXACTLY)


def test_evaluation_and_generation_stay_as_they_are(tmp_path):
    plan = Plan(precision="fp16", nonzero=50, microbatch=2)
    changes = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
    lean = trained(LeanTrainer, tmp_path, how={"plan": plan, "eval_dataset": sentences(5)}, **changes)
    assert sum("eval_loss" in line for line in lean.state.log_history) == 2
    assert lean.model.generate(torch.tensor([[1, 2]]), max_new_tokens=3, do_sample=False).shape == (1, 5)


def test_groups_without_decay_and_warm_up_reach_the_plans_optimizer(tmp_path):
    lean = trained(LeanTrainer, tmp_path, how={"plan": Plan(optimizer="8bit")})
    decayed, others = lean.guest.lean.optimizer.param_groups
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() == 1 for parameter in others["params"])
    assert [line["learning_rate"] for line in lean.state.log_history[:3]] == [0.0, 0.005, 0.01]


def test_an_optimizer_and_a_scheduler_of_the_users_are_taken_over(tmp_path):
    def run(kind, **how):
        model = gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return trained(kind, tmp_path, model, {"optimizers": (optimizer, scheduler), **how})

    theirs, ours = run(transformers.Trainer), run(LeanTrainer, plan=Plan())
    same_weights(theirs, ours, **EXACTLY)
    assert ours.guest.lean.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 / 16)


def test_frozen_weights_of_an_adapter_have_no_gradient_and_no_state_and_are_counted_so(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")

    def adapted():
        return peft.get_peft_model(gpt2(), peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))

    how = {"plan": Plan(optimizer="8bit", microbatch=2)}
    lean = trained(LeanTrainer, tmp_path, adapted(), how, save_strategy="steps", save_steps=2)
    adapters = [parameter for parameter in lean.model.parameters() if parameter.requires_grad]
    assert set(lean.guest.lean.optimizer.state) == set(adapters)
    counted, sizes = lean.guest.lean.plan.predicted_bytes, sum(parameter.nbytes for parameter in adapters)
    assert counted["gradient"] == sizes and counted["optimizer_state"] <= 2 * sizes
    assert (tmp_path / "checkpoint-4" / "adapter_model.safetensors").exists()
    again = trained(LeanTrainer, tmp_path, adapted(), how, resume=str(tmp_path / "checkpoint-2"))
    same_weights(lean, again, **EXACTLY)


# -- bad input -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("argument", ["gradient_checkpointing", "bf16", "fp16", "deepspeed", "fsdp", "torch_compile"])
def test_an_argument_that_a_plan_takes_the_place_of_is_refused_in_one_line(tmp_path, argument):
    args = arguments(tmp_path)
    setattr(args, argument, True)  # some cannot be made here: fp16 needs a GPU, DeepSpeed its package
    with pytest.raises(ShoestringError, match=f"^{argument} and a LeanTrainer .* because .*: ") as error:
        LeanTrainer(gpt2(), args, train_dataset=sentences(), budget="1GB")
    assert "\n" not in str(error.value)


def test_a_model_that_recomputes_by_itself_is_refused(tmp_path):
    model = gpt2()
    model.gradient_checkpointing_enable()
    with pytest.raises(ShoestringError, match="gradient_checkpointing"):
        LeanTrainer(model, arguments(tmp_path), budget="1GB")


def test_neither_budget_nor_plan_or_no_data_is_refused(tmp_path):
    with pytest.raises(ShoestringError, match="needs budget"):
        LeanTrainer(gpt2(), arguments(tmp_path))
    with pytest.raises(ShoestringError, match="'4 parsecs' is not a size"):
        trained(LeanTrainer, tmp_path, how={"budget": "4 parsecs"})
    with pytest.raises(ShoestringError, match="a batch that is a list"):
        LeanTrainer(gpt2(), arguments(tmp_path, remove_unused_columns=False), train_dataset=sentences(), budget="1GB",
                    data_collator=list).train()  # fmt: skip
