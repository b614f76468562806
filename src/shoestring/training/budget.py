"""A run's budget in bytes: steps are run under a meter or a watch, and one that needs more is told."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import OverBudget
from ..ledger import Phase
from ..phases import listen
from ..units import format_bytes

Meter = Callable[
    [Callable[[], Any], Iterable[Tensor]], Any
]  # runs a function beside live tensors -> Measurement
MEASURED_UPDATES = 2  # from the second on, the optimizer's state is in place


class Budget:
    """Measures the first updates and each whose batch is larger than all before; watches the others.

    `meter(run, held)` gives a reading with `peak_bytes` and `to_json()`; `watch()` the bytes in use now, and
    is asked at each change of phase, before the update of the weights. `measured` is the reading of the
    highest peak.
    """

    def __init__(self, limit: int | None, meter: Meter | None, watch: Callable[[], int] | None) -> None:
        self.limit, self.meter, self.watch = limit, meter, watch
        self.measured: Any = None
        self.used_bytes = 0  # of the step that was over the budget
        self._updates = self._largest = 0

    @property
    def peak_bytes(self) -> int | None:
        return self.measured.peak_bytes if self.measured else None

    def run(self, step: Callable[[], Tensor], batch: Any, held: Callable[[], Iterable[Tensor]]) -> Tensor:
        """Runs a step -> its loss; OverBudget, before the weights change, where the watch finds too much."""
        if self.meter is None or not self._is_new(batch):
            with listen(self._look):
                return step()
        losses: list[Tensor] = []
        reading = self.meter(lambda: losses.append(step()), [*held(), *tensors_in(batch)])
        if self.measured is None or reading.peak_bytes > self.measured.peak_bytes:
            self.measured = reading
        return losses[0]

    def check(self) -> None:
        """Raises OverBudget if a step that was measured occupied too much."""
        if self.limit is not None and self.peak_bytes is not None and self.peak_bytes > self.limit:
            where = getattr(self.measured, "peak_operation", "")
            raise self._over(self.peak_bytes, f"measured{f', in {where}' if where else ''}")

    def forget(self) -> None:
        """Starts anew, for a step that was planned anew."""
        self.measured, self._updates, self._largest = None, 0, 0

    def _is_new(self, batch: Any) -> bool:
        size = sum(tensor.nbytes for tensor in tensors_in(batch))
        new = self._updates < MEASURED_UPDATES or size > self._largest
        self._updates, self._largest = self._updates + 1, max(size, self._largest)
        return new

    def _look(self, phase: Phase) -> None:
        if self.limit is None or self.watch is None or phase is Phase.BUILD:
            return
        if (used := self.watch()) > self.limit:
            raise self._over(used, f"seen at the start of {phase}")

    def _over(self, used: int, how: str) -> OverBudget:
        self.used_bytes = used
        return OverBudget(
            f"a step occupies {format_bytes(used)} ({how}), and the budget is "
            f"{format_bytes(self.limit or 0)}: plan again with what was measured, or raise the budget"
        )


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
