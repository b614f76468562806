"""`load(run)`: the folder of a run -> its trained model, in plain PyTorch."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn

from ..errors import DamagedSave, ShoestringError
from ..models import builtin, materialise
from ..models.tasks import is_known
from ..records import matches
from ..runs.averaging import Mean
from ..runs.export import WEIGHTS, check_fits, fill, plain_tensors
from ..runs.folder import RunFolder
from ..runs.record import RunRecord, read_record


def load(
    run: str | Path, model: nn.Module | None = None, weights: str = "best", warn: Callable[[str], None] | None = None
) -> nn.Module:
    """The folder of a run -> its trained model in plain PyTorch (dense, FP32), in evaluation mode.

    A built-in model is built from the run's record. For one of your own pass it, as it is before any plan: the weights
    are read into it, whatever the plan was. `weights` are the "best" ones, the "last" or the "averaged". They are
    compared with their checksums; `warn` is called with what is damaged and passed over. Nothing in the folder is
    executed.
    """
    if weights not in WEIGHTS:
        raise ShoestringError(f"there are no weights {weights!r}: use one of {', '.join(WEIGHTS)}")
    path = Path(run)
    record = read_record(RunFolder(path).record_path)
    found = plain_tensors(path, weights, warn)
    if model is None:
        model = built(record, path, found)
    fill(model, found, path)
    return model.eval()


def built(record: RunRecord, path: Path, found: Mapping[str, Mean]) -> nn.Module:
    """The built-in model of a run, with new weights; refused before memory is taken if it is of other shapes."""
    if not is_known(record.task) or "options" not in record.command:
        name = record.command.get("model", record.task)
        raise ShoestringError(f"the model of {path} is your own ({name}): build it, and call load(run, model)")
    options = record.command["options"]
    if not matches(options, dict[str, int | float | str]):
        raise DamagedSave(f"the record of {path} is damaged: the options of its model are {str(options)[:40]!r}")
    model = builtin(record.task, device="meta", **options).model
    check_fits(model, found, path)
    materialise(model)
    return model
