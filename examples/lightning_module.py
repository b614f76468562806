"""A LightningModule inside a memory budget: one callback more, and the module stays as it is.

pip install lightning
python examples/lightning_module.py
"""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shoestring.integrations.lightning import Shoestring


class Classifier(pl.LightningModule):
    """The largest of the first ten of 64 coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        inputs, labels = batch
        loss = nn.functional.cross_entropy(self.net(inputs), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)}


def main(budget: str = "6MB", epochs: int = 3) -> dict[str, float]:
    torch.manual_seed(0)
    inputs = torch.randn(4096, 64)
    data = DataLoader(TensorDataset(inputs, inputs[:, :10].argmax(1)), batch_size=256, shuffle=True)
    callback = Shoestring(budget=budget)
    trainer = pl.Trainer(
        max_epochs=epochs, callbacks=[callback], accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Classifier(), data)
    print(callback.guest.describe())
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


if __name__ == "__main__":
    main()
