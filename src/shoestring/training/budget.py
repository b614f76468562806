"""A run's budget in bytes: steps run under a meter or a watch, and one that needs more raises OverBudget."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor

from ..errors import OverBudget
from ..ledger import Phase
from ..phases import listen
from ..structure import tensors
from ..units import format_bytes

Meter = Callable[[Callable[[], Any], Iterable[Tensor]], Any]  # runs a function beside live tensors -> Measurement
MEASURED_UPDATES = 2  # from the second on, the optimizer's state is in place
MEASURED_AGAIN = 500  # every so many updates one is measured again: rewiring may have changed what is stored


class Budget:
    """Measures the first updates, a later one now and then, and every one with a larger batch or larger lasting tensors
    than before; watches the others.

    `meter(run, held)` gives a reading with `peak_bytes` and `to_json()`. `watch()` gives the bytes in use now; it is
    called at each change of phase, before the weights are updated. `predict(batch)` gives the bytes of a step; it is
    called for batches larger than the `planned` bytes, before anything runs. `measured` is the reading with the
    highest peak.
    """

    def __init__(
        self,
        limit: int | None,
        meter: Meter | None,
        watch: Callable[[], int] | None,
        planned: int = 0,
        predict: Callable[[Any], int] | None = None,
    ) -> None:
        self.limit, self.meter, self.watch, self.predict = limit, meter, watch, predict
        self.measured: Any = None
        self.last_bytes: int | None = None  # the peak of the last step, if it was measured
        self.used_bytes = 0  # of the step that was over the budget
        self._planned = planned
        self._updates = self._largest = self._most_held = 0

    @property
    def peak_bytes(self) -> int | None:
        return self.measured.peak_bytes if self.measured else None

    def run(self, step: Callable[[], Any], batch: Any, held: Callable[[], Iterable[Tensor]]) -> Any:
        """Runs a step -> its loss; raises OverBudget, before the weights change, if too much is predicted or seen."""
        self._foresee(batch)
        self.last_bytes = None
        if self.meter is None or not self._is_new(batch, sum(tensor.nbytes for tensor in held())):
            with listen(self._look):
                return step()
        losses: list[Any] = []
        reading = self.meter(lambda: losses.append(step()), [*held(), *tensors(batch)])
        self.last_bytes = reading.peak_bytes
        if self.measured is None or reading.peak_bytes > self.measured.peak_bytes:
            self.measured = reading
        return losses[0]

    def check(self) -> None:
        """Raises OverBudget if a measured step occupied too much."""
        if self.limit is not None and self.peak_bytes is not None and self.peak_bytes > self.limit:
            where = getattr(self.measured, "peak_operation", "")
            raise self._over(self.peak_bytes, f"measured{f', in {where}' if where else ''}")

    def reset(self) -> None:
        """Starts measuring anew, after the step was replanned."""
        self.measured = None
        self._updates = self._largest = self._most_held = 0

    def _foresee(self, batch: Any) -> None:
        foreseen = max(self._planned, self._largest)
        if self.limit is None or self.predict is None or not foreseen:
            return
        if (size := batch_bytes(batch)) > foreseen and (peak := self.predict(batch)) > self.limit:
            raise self._over(peak, f"predicted for a batch of {format_bytes(size)}, which is larger than planned")

    def _is_new(self, batch: Any, kept: int) -> bool:
        """Whether this update may need more than those so far; FP16 often skips the first, which make no state."""
        size = batch_bytes(batch)
        new = self._updates < MEASURED_UPDATES or self._updates % MEASURED_AGAIN == 0
        new = new or size > self._largest or kept > self._most_held
        self._updates += 1
        self._largest, self._most_held = max(size, self._largest), max(kept, self._most_held)
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
            f"{format_bytes(self.limit or 0)}: go on with --resume --replan (in Python, replan=True), which takes "
            "smaller microbatches, or raise the budget"
        )


def batch_bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(batch))
