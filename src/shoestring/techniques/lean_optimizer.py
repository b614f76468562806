"""Lean optimizers: state in 16 or 8 bits, gradients that are used up as they are made, SM3 and Adafactor.

    Plan(optimizer="8bit")  "fp16"  "bf16"  "no-gradient"  "8bit+no-gradient"  "sm3"  "sm3+8bit"  "adafactor"

| words | state, bytes a parameter: SGD, Adam | risk |
|---|---|---|
| fp16, bf16 | 2, 4 | neutral |
| 8bit | 1.02, 2.03 | neutral |
| no-gradient | as before, and no gradient: 4 bytes (2 in 16 bits) less | exact |
| sm3 | 4 (1.02 with 8bit, 0 without momentum) | approximate |
| adafactor | 0 | approximate |
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import NoEffect, ShoestringError
from ..kernels.moments import FORMS
from ..task import SGD, Adam, Task
from .factored import SM3, Adafactor, LeanAdafactor, LeanSM3
from .lean_base import LeanOptimizer, refuse_using_up, why_gradients_stay
from .lean_rules import LeanAdam, LeanSGD
from .risk import Risk

NARROW = tuple(form for form in FORMS if form != "fp32")
FACTORED = ("sm3", "adafactor")
USING_UP = "no-gradient"
BUILDERS: dict[type, Callable[..., LeanOptimizer]] = {
    SGD: LeanSGD,
    Adam: LeanAdam,
    SM3: LeanSM3,
    Adafactor: LeanAdafactor,
}


@dataclass(frozen=True)
class Lean:
    """Settings of a lean optimizer: a rule, the form of its moments, and whether gradients are used up at once.

    `seed` is that of the random bits by which BF16 weights and narrow second moments are rounded.
    """

    rule: SGD | Adam | SM3 | Adafactor
    state: str = "fp32"
    uses_up: bool = False
    seed: int = 0

    def __call__(self, parameters: Iterable[nn.Parameter]) -> LeanOptimizer:
        return BUILDERS[type(self.rule)](parameters, self.rule, self.state, self.uses_up, self.seed)


@dataclass(frozen=True)
class Settings:
    """`words` are joined by +: a form of the state (fp16, bf16, 8bit), sm3 or adafactor, no-gradient."""

    words: str

    def pick(self, known: Iterable[str]) -> str | None:
        """The one of the known words that is there, if any."""
        found = [word for word in self.words.split("+") if word in known]
        if len(found) > 1:
            raise ShoestringError(f"{found[0]} and {found[1]} are two forms of one thing: choose one")
        return found[0] if found else None


def options(task: Task) -> list[str]:
    """What the planner tries."""
    if type(rule_of(task.optimizer)) not in (SGD, Adam):
        return []
    using_up = [USING_UP] if why_gradients_stay(task) is None else []
    return [*using_up, "8bit", *(f"8bit+{word}" for word in using_up)]


def risk(task: Task, words: str) -> Risk:
    """Exact where gradients alone go; narrow state was found neutral, factored second moments change the method."""
    settings = Settings(words)
    if settings.pick(FACTORED):
        return Risk.APPROXIMATE
    return Risk.NEUTRAL if settings.pick(NARROW) else Risk.EXACT


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task with a lean optimizer."""
    if unknown := set(settings.words.split("+")) - {*FORMS, *FACTORED, USING_UP}:
        known = ", ".join([*NARROW, *FACTORED, USING_UP])
        raise ShoestringError(f"there is no lean optimizer {min(unknown)!r}: use {known}, joined by +")
    lean = lean_update(task.optimizer, settings.pick(FORMS))
    if kind := settings.pick(FACTORED):
        lean = replace(lean, rule=factored(kind, lean.rule))
    if settings.pick([USING_UP]):
        refuse_using_up(task)
        lean = replace(lean, uses_up=True)
    if has_no_state(lean.rule) and lean.state != "fp32" and not kind and not lean.uses_up:
        raise NoEffect(f"{lean.rule} keeps nothing that {lean.state} could make smaller: leave it out of the plan")
    settings_now = task.settings | {"optimizer": settings.words}
    return task.with_(optimizer=lean, settings=settings_now)


def lean_update(optimizer: Any, state: str | None = None) -> Lean:
    """Settings of an optimizer and a form of its state (by default the one that it has) -> its lean form."""
    if state is not None and state not in FORMS:
        raise ShoestringError(f"there is no form {state!r} of optimizer state: use {', '.join(FORMS)}")
    rule = rule_of(optimizer)
    if type(rule) not in BUILDERS:
        name = getattr(rule, "__qualname__", type(rule).__qualname__)
        raise ShoestringError(
            f"the lean form of {name} is not known: give the task SGD(...), Adam(...), SM3(...) or Adafactor(...)"
        )
    lean = optimizer if isinstance(optimizer, Lean) else Lean(rule)
    return lean if state is None else replace(lean, state=state)


def rule_of(optimizer: Any) -> Any:
    return optimizer.rule if isinstance(optimizer, Lean) else optimizer


def factored(kind: str, rule: Any) -> SM3 | Adafactor:
    """An Adam (or SGD) -> the factored method with its learning rate, momentum and weight decay."""
    if isinstance(rule, SM3 | Adafactor):
        return rule
    if kind == "sm3":
        momentum = rule.betas[0] if isinstance(rule, Adam) else rule.momentum
        return SM3(rule.lr, momentum, rule.weight_decay)
    if not isinstance(rule, Adam):
        raise ShoestringError("adafactor takes the place of Adam, not of SGD: give the task Adam(...), or use sm3")
    return Adafactor(rule.lr, relative=False, weight_decay=rule.weight_decay)


def has_no_state(rule: Any) -> bool:
    return isinstance(rule, Adafactor) or (isinstance(rule, SGD | SM3) and not rule.momentum)
