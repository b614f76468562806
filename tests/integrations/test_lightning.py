"""Lightning with a budget: the same training, inside it, with all that the Trainer does around it."""

import logging

import pytest
import torch
from torch import nn

pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed: pip install lightning")

from shoestring import Plan, ShoestringError  # noqa: E402
from shoestring.integrations import guest  # noqa: E402
from shoestring.integrations.lightning import Shoestring  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
EXACTLY = {"rtol": 0, "atol": 0}


@pytest.fixture
def a_small_meter(monkeypatch):
    """So that steps are measured in budgets of a few MB, of which the real meter would be the larger part."""
    monkeypatch.setattr(guest, "meter_room", lambda limit: 0)


def examples(count=48):
    torch.manual_seed(1)
    return list(zip(torch.randn(count, 16), torch.randint(4, (count,)), strict=True))


class Classifier(pl.LightningModule):
    def __init__(self, width=64):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
        )

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("valid", self.net(batch[0]).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Resumable(torch.utils.data.DataLoader):
    """A loader that goes on where it was, as Lightning asks of one in the middle of an epoch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.read = self.skip = 0

    def __iter__(self):
        self.read, skip, self.skip = self.skip, self.skip, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skip:
                self.read += 1
                yield batch

    def state_dict(self):
        return {"read": self.read}

    def load_state_dict(self, state):
        self.skip = state["read"]


def fitted(folder, *callbacks, module=None, resume=None, **changes):
    module = module or Classifier()
    usual = {"max_epochs": 2, "logger": False, "accelerator": "cpu", "default_root_dir": folder}
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    trainer = pl.Trainer(callbacks=list(callbacks), **(usual | quiet | changes))
    valid = torch.utils.data.DataLoader(examples(8), batch_size=4)
    trainer.fit(module, Resumable(examples(), batch_size=8), valid, ckpt_path=resume)
    return module, trainer


def metrics(trainer):
    return {name: float(value) for name, value in trainer.callback_metrics.items() if not name.startswith("mem/")}


@pytest.mark.parametrize("changes", [
    {}, {"accumulate_grad_batches": 4}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01,
    "gradient_clip_algorithm": "value"},
], ids=["plain", "accumulated", "clipped", "clipped by value"])  # fmt: skip
def test_where_everything_fits_it_is_lightnings_training_to_the_bit(tmp_path, changes):
    (theirs, plain), (ours, lean) = fitted(tmp_path, **changes), fitted(tmp_path, Shoestring(plan=Plan()), **changes)
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), **EXACTLY)
    assert metrics(lean) == metrics(plain)
    assert lean.optimizers[0].param_groups[0]["lr"] == plain.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize("changes", [{}, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}])
def test_microbatches_train_the_same_and_log_once_per_batch(tmp_path, changes):
    theirs, plain = fitted(tmp_path, **changes)
    ours, lean = fitted(tmp_path, Shoestring(plan=Plan(microbatch=3)), **changes)
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), rtol=1e-4, atol=1e-5)
    assert metrics(lean) == pytest.approx(metrics(plain), rel=1e-4, abs=1e-6)


def test_a_budget_is_planned_for_and_what_is_predicted_is_measured_and_logged(tmp_path, a_small_meter):
    _, plain = fitted(tmp_path, Shoestring(plan=Plan()), module=Classifier(512), accumulate_grad_batches=3)
    before = {name: float(value) for name, value in plain.callback_metrics.items()}
    assert before["mem/predicted_bytes"] == pytest.approx(before["mem/peak_bytes"], rel=0.01)
    budget = round(0.85 * before["mem/peak_bytes"])
    _, lean = fitted(tmp_path, Shoestring(budget=budget), module=Classifier(512), accumulate_grad_batches=3)
    after = {name: float(value) for name, value in lean.callback_metrics.items()}
    assert lean.callbacks[0].guest.lean.plan.techniques()
    assert after["mem/peak_bytes"] <= after["mem/budget_bytes"] == budget
    assert after["mem/predicted_bytes"] == pytest.approx(after["mem/peak_bytes"], rel=0.01)


PLANS = {
    "8bit": Plan(optimizer="8bit"),
    "fp16": Plan(precision="fp16", microbatch=3),
    "sparse": Plan(nonzero={"nonzero": 50, "updates": 12, "frequency_multiplier": 400}),
    "no-gradient": Plan(optimizer="no-gradient"),
}


@pytest.mark.parametrize("plan", PLANS)
def test_a_run_resumes_in_the_middle_of_an_epoch_to_the_same_bits_under_its_plan(tmp_path, plan):
    keep = pl.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    through, _ = fitted(tmp_path, Shoestring(plan=PLANS[plan]), keep, enable_checkpointing=True)
    checkpoint = tmp_path / "step=4.ckpt"
    again, trainer = fitted(tmp_path, Shoestring(budget="1GB"), resume=checkpoint)
    assert trainer.callbacks[0].guest.lean.plan.techniques() == PLANS[plan].techniques()
    torch.testing.assert_close(through.state_dict(), again.state_dict(), **EXACTLY)
    plain = Classifier()
    plain.load_state_dict(torch.load(checkpoint, weights_only=True)["state_dict"])  # a plain module's weights


def test_the_module_is_as_it_was_afterwards_also_if_training_fails(tmp_path):
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2:
                raise KeyError("a bug of the user's")
            return super().training_step(batch, batch_idx)

    for module in (Classifier(), Failing()):
        try:
            fitted(tmp_path, Shoestring(plan=Plan()), module=module)
        except KeyError:
            assert isinstance(module, Failing)
        assert not {name for name in vars(module) if callable(getattr(Classifier, name, None))}


def test_a_module_that_returns_several_schedulers_or_a_bare_optimizer_is_taken(tmp_path):
    class Bare(Classifier):
        def training_step(self, batch):
            return {"loss": nn.functional.cross_entropy(self.net(batch[0]), batch[1]), "more": 1}

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    theirs, ours = (fitted(tmp_path, *how, module=Bare())[0] for how in ((), (Shoestring(plan=Plan()),)))
    torch.testing.assert_close(theirs.state_dict(), ours.state_dict(), **EXACTLY)


# -- bad input -----------------------------------------------------------------------------------------------------
class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Two(Classifier):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.net[0].parameters(), 0.1), torch.optim.SGD(self.net[2].parameters(), 0.1)]


@pytest.mark.parametrize(("module", "changes", "words"), [
    (Manual, {}, "automatic optimization"),
    (Two, {}, "2 optimizers"),
    (Classifier, {"precision": "bf16-mixed"}, "precision='bf16-mixed'"),
], ids=["manual", "two optimizers", "precision"])  # fmt: skip
def test_what_a_plan_cannot_be_beside_is_refused_in_one_line(tmp_path, module, changes, words):
    with pytest.raises(ShoestringError, match=words) as error:
        fitted(tmp_path, Shoestring(budget="1GB"), module=module(), **changes)
    assert "\n" not in str(error.value)


def test_neither_budget_nor_plan_is_refused():
    with pytest.raises(ShoestringError, match="needs budget"):
        Shoestring()


def test_a_step_is_measured_by_the_counter_or_where_the_profiler_fits_the_budget(tmp_path, monkeypatch):
    if guest.is_available():
        _, counted = fitted(tmp_path, Shoestring(budget="8MB", plan=Plan()), max_epochs=1)
        assert "mem/peak_bytes" in counted.callback_metrics
    monkeypatch.setattr(guest, "is_available", lambda: False)
    _, tight = fitted(tmp_path, Shoestring(budget="8MB", plan=Plan()), max_epochs=1)
    _, roomy = fitted(tmp_path, Shoestring(budget="40MB", plan=Plan()), max_epochs=1)
    assert "mem/peak_bytes" not in tight.callback_metrics and "mem/predicted_bytes" in tight.callback_metrics
    assert "mem/peak_bytes" in roomy.callback_metrics
    assert guest.meter_room(10**9) == 5 * 10**7 and guest.meter_room(10**6) == 16 * 10**6
