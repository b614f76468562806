"""SGD and Adam on lean state: torch.optim's algorithms, one tensor at a time."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from ...distributed import local
from ...kernels.moments import Moment
from ...kernels.update import Noise, adam_update, sgd_accumulate, sgd_apply_momentum, sgd_update
from ...task import SGD
from .base import LeanOptimizer


def is_heavy_ball(settings: Mapping[str, Any]) -> bool:
    """Whether an update depends on the momentum alone, so that gradients can be folded into it one by one."""
    return settings.get("momentum", 0) != 0 and not settings.get("nesterov", True)


class LeanSGD(LeanOptimizer):
    """SGD. Heavy-ball momentum accumulates gradients: m = mu m + g1 + g2 + ... needs them one at a time."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], rule: SGD, form: str, in_backward: bool, seed: int, sums: str = ""
    ) -> None:
        super().__init__(parameters, rule, form, in_backward, seed, sums)
        self.folds_into_momentum = in_backward and all(map(is_heavy_ball, self.param_groups))
        if any(group["nesterov"] for group in self.param_groups):
            self.why_not_folded = "Nesterov's momentum needs the sum of their gradients beside the momentum"

    def update(self, weight: Tensor, group: dict, gradient: Tensor | Moment, factor: float, noise: Noise) -> None:
        momentum = self.moment(weight, group, "momentum_buffer") if group["momentum"] else None
        sgd_update(
            local(weight),
            gradient,
            momentum,
            lr=group["lr"],
            mu=group["momentum"],
            nesterov=group["nesterov"],
            weight_decay=group["weight_decay"],
            factor=factor,
            noise=noise,
        )

    def fold_into_momentum(self, weight: Tensor, group: dict, gradient: Tensor, is_first: bool) -> None:
        momentum = self.moment(weight, group, "momentum_buffer")
        if is_first:
            mu, decay = group["momentum"], group["weight_decay"]
            sgd_accumulate(weight, gradient, momentum, mu=mu, weight_decay=decay)
        else:
            sgd_accumulate(weight, gradient, momentum)

    def apply_momentum(self, weight: Tensor, group: dict, noise: Noise) -> None:
        sgd_apply_momentum(weight, self.moment(weight, group, "momentum_buffer"), lr=group["lr"], noise=noise)


class LeanAdam(LeanOptimizer):
    """Adam and AdamW."""

    why_not_folded = "Adam's second moment needs the square of their sum"

    def update(self, weight: Tensor, group: dict, gradient: Tensor | Moment, factor: float, noise: Noise) -> None:
        first = self.moment(weight, group, "exp_avg")
        second = self.moment(weight, group, "exp_avg_sq", positive=True)
        state = self.state[weight]
        state["step"] = state.get("step", 0) + 1
        adam_update(
            local(weight),
            gradient,
            first,
            second,
            step=state["step"],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["decoupled"],
            factor=factor,
            noise=noise,
        )
