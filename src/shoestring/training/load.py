"""`load(run)`: the folder of a run -> its trained model, in plain PyTorch."""

from pathlib import Path

from torch import nn

from ..errors import ShoestringError
from ..models import builtin, materialise
from ..models.tasks import is_known
from ..runs.export import WEIGHTS, fill, plain_tensors
from ..runs.folder import RunFolder
from ..runs.record import RunRecord, read_record


def load(run: str | Path, model: nn.Module | None = None, weights: str = "best") -> nn.Module:
    """The folder of a run -> its trained model in plain PyTorch (dense, FP32), in evaluation mode.

    A built-in model is built from the run's record. For one of your own pass it, as it is before any plan: the weights
    are read into it, whatever the plan was. `weights` are the "best" ones, the "last" or the "averaged". Nothing in
    the folder is executed.
    """
    if weights not in WEIGHTS:
        raise ShoestringError(f"there are no weights {weights!r}: use one of {', '.join(WEIGHTS)}")
    path = Path(run)
    record = read_record(RunFolder(path).record_path)
    found = plain_tensors(path, weights)
    if model is None:
        model = built(record, path)
    fill(model, found, path)
    return model.eval()


def built(record: RunRecord, path: Path) -> nn.Module:
    """The built-in model of a run, with new weights."""
    if not is_known(record.task) or "options" not in record.command:
        name = record.command.get("model", record.task)
        raise ShoestringError(f"the model of {path} is your own ({name}): build it, and call load(run, model)")
    model = builtin(record.task, device="meta", **record.command["options"]).model
    materialise(model)
    return model
