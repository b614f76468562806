"""A run's budget in bytes: steps run under a meter or a watch, and one that needs more raises OverBudget.

A meter that costs little (`costs_little`: measuring/counted.py) measures every step, evaluation and save. Under one
that listens to torch.profiler a step takes 1.2 to 1.6 times as long, so it is not always on: measured are
- the first two updates, each 500th, and each whose batch or lasting tensors have more bytes than any before;
- of updates that do more than others (rewire, measure codecs), and of those with a batch of a new shape: the first
  FIRST, and then one in PACE updates, which costs under 1%. So a new shape that needs more, though it has no more bytes
  than an earlier one, may be met up to PACE updates before it is measured;
- the first evaluation (its first batches), the first save and the averaging of a process.
"""

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
FIRST, PACE = 5, 64  # 0.6 / 64 is under 1%


class Pace:
    """Which events of a kind are measured: the first few, and then one in PACE updates."""

    def __init__(self) -> None:
        self.count, self.last = 0, 0

    def is_time(self, update: int) -> bool:
        if self.count >= FIRST and update - self.last < PACE:
            return False
        self.count, self.last = self.count + 1, update
        return True


class Budget:
    """Measures the updates, and what is done between them, that the module's text names; watches the other updates.

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
        self.always = getattr(meter, "costs_little", False)
        self.measured: Any = None
        self.last_bytes: int | None = None  # the peak of the last step, if it was measured
        self.used_bytes = 0  # of the step that was over the budget,
        self.was_used = True  # and whether it was, or only predicted
        self.beside: dict[str, int] = {}  # the peak of what was done between steps, by its name
        self._planned = planned
        self.reset()

    @property
    def peak_bytes(self) -> int | None:
        return self.measured.peak_bytes if self.measured else None

    def run(self, step: Callable[[], Any], batch: Any, held: Callable[[], Iterable[Tensor]], more: bool = False) -> Any:
        """Runs a step -> its loss; raises OverBudget, before the weights change, if too much is predicted or seen.

        `more`: the step does more than an update, as one that rewires.
        """
        self._foresee(batch)
        self.last_bytes = None
        kept = [*held(), *tensors(batch)] if self.meter else []
        if self.meter is None or not self._is_new(batch, sum(tensor.nbytes for tensor in kept), more):
            with listen(self._look):
                return step()
        losses: list[Any] = []
        with listen(self._look):
            reading = self.meter(lambda: losses.append(step()), kept)
        self.last_bytes = reading.peak_bytes
        if self.measured is None or reading.peak_bytes > self.measured.peak_bytes:
            self.measured = reading
        return losses[0]

    def wants(self, what: str) -> bool:
        """Whether something between steps is to be measured: the first of its kind in this process; each, if that costs
        little and none was over the budget, which is told once."""
        if self.meter is None or self.limit is None:
            return False
        return what not in self.beside or (self.always and self.beside[what] <= self.limit)

    def around(self, what: str, act: Callable[[], Any], held: Callable[[], Iterable[Tensor]]) -> Any:
        """Does something between steps -> its result; raises OverBudget if it was measured and occupied too much."""
        if not self.wants(what):
            return act()
        assert self.meter is not None
        results: list[Any] = []
        peak = self.meter(lambda: results.append(act()), held()).peak_bytes
        self.beside[what] = max(peak, self.beside.get(what, 0))
        if self.limit is not None and self.beside[what] > self.limit:
            raise OverBudget(
                f"the {what} occupies {format_bytes(self.beside[what])} (measured), and the budget is "
                f"{format_bytes(self.limit)}: raise it, or let the {what} take less, as in smaller batches"
            )
        return results[0]

    def check(self) -> None:
        """Raises OverBudget if a measured step occupied too much."""
        if self.limit is not None and self.peak_bytes is not None and self.peak_bytes > self.limit:
            where = getattr(self.measured, "peak_operation", "")
            raise self._over(self.peak_bytes, f"measured{f', in {where}' if where else ''}")

    def reset(self) -> None:
        """Starts measuring anew, after the step was replanned."""
        self.measured, self.beside = None, {}
        self._updates = self._largest = self._most_held = 0
        self._shapes: set[Any] = set()
        self._more, self._new_shape = Pace(), Pace()

    def _foresee(self, batch: Any) -> None:
        foreseen = max(self._planned, self._largest)
        if self.limit is None or self.predict is None or not foreseen:
            return
        if (size := batch_bytes(batch)) > foreseen and (peak := self.predict(batch)) > self.limit:
            raise self._over(
                peak, f"predicted for a batch of {format_bytes(size)}, which is larger than planned", False
            )

    def _is_new(self, batch: Any, kept: int, more: bool) -> bool:
        """Whether this update may need more than those so far; FP16 often skips the first, which make no state."""
        size, shape = batch_bytes(batch), tuple((tensor.dtype, tensor.shape) for tensor in tensors(batch))
        new = self.always or self._updates < MEASURED_UPDATES or self._updates % MEASURED_AGAIN == 0
        new = new or size > self._largest or kept > self._most_held
        new = new or (more and self._more.is_time(self._updates))
        new = new or (shape not in self._shapes and self._new_shape.is_time(self._updates))
        if new:
            self._shapes.add(shape)
        self._updates += 1
        self._largest, self._most_held = max(size, self._largest), max(kept, self._most_held)
        return new

    def _look(self, phase: Phase) -> None:
        if self.limit is None or self.watch is None or phase is Phase.BUILD:
            return
        if (used := self.watch()) > self.limit:
            raise self._over(used, f"seen at the start of {phase}")

    def _over(self, used: int, how: str, was_used: bool = True) -> OverBudget:
        self.used_bytes, self.was_used = used, was_used
        return OverBudget(
            f"a step occupies {format_bytes(used)} ({how}), and the budget is "
            f"{format_bytes(self.limit or 0)}: go on with --resume --replan (in Python, replan=True), which takes "
            "smaller microbatches, or raise the budget"
        )


def batch_bytes(batch: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(batch))
