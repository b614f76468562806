"""Lean optimizers: state in 16 or 8 bits, optimizer in backward (`no-gradient`), SM3 and Adafactor.

The card is docs/techniques/optimizer.md.

    Plan(optimizer="8bit")  "fp16"  "bf16"  "no-gradient"  "8bit+no-gradient"  "sm3"  "sm3+8bit"  "adafactor"

| words | state, bytes per parameter: SGD, Adam | risk |
|---|---|---|
| fp16, bf16 | 2.02 and 2, 4.03 and 4 | neutral |
| 8bit | 1.02, 2.03 | neutral |
| no-gradient | as before, and no gradient: 4 bytes (2 in 16 bits) less | exact |
| 8bit-gradient | as before, and 1.02 for the sum of the microbatches' gradients, in place of 4 (2) | approximate |
| sm3 | 4 (1.02 with 8bit, 0 without momentum) | approximate |
| adafactor | 0 | approximate |
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...errors import NoEffect, ShoestringError
from ...kernels.moments import FORMS
from ...optimizers import trainable
from ...task import SGD, Adam, Task
from ..evidence import SHORT
from ..technique import Effect, Risk, Technique
from .base import LOSS_SCALE, LeanOptimizer, refuse_in_backward, refuse_sums, why_gradients_stay, why_not_summed
from .factored import SM3, Adafactor, LeanAdafactor, LeanSM3
from .rules import Group, Rule, groups_of
from .sgd_adam import LeanAdam, LeanSGD, is_heavy_ball

NARROW = tuple(form for form in FORMS if form != "fp32")
FACTORED = ("sm3", "adafactor")
IN_BACKWARD = "no-gradient"
SUMS = "8bit-gradient"
SUMMED = (
    "cosine of the sum of ten microbatches' gradients with the exact one 0.9995 (WRN-10-2, CIFAR-10 at 16 x 16, "
    "benchmarks/hundredfold.py); no run of ours has it alone"
)
BUILDERS: dict[type, Callable[..., LeanOptimizer]] = {
    SGD: LeanSGD,
    Adam: LeanAdam,
    SM3: LeanSM3,
    Adafactor: LeanAdafactor,
}


@dataclass(frozen=True)
class LeanSettings:
    """Settings of a lean optimizer: an update rule, the dtype of its moments, and whether it runs in backward.

    `seed` is that of the stochastic rounding of BF16 weights and 16- or 8-bit second moments. If there are `groups`,
    each has an update rule of its own, of one kind.
    """

    rule: Rule
    state: str = "fp32"
    in_backward: bool = False
    seed: int = 0
    sums: str = ""  # the form in which the gradients of microbatches add up
    groups: tuple[Group, ...] = field(default=(), repr=False)

    def __call__(self, named_parameters: Iterable[Any]) -> LeanOptimizer:
        """Pairs of name and parameter, or parameters alone if there are no groups -> the optimizer."""
        given = list(named_parameters)
        parameters = [one[1] if isinstance(one, tuple) else one for one in given]
        if self.groups:
            found = dict(given)
            parameters = [{"params": [found[name] for name in g.names], **vars(g.rule)} for g in self.groups]
        more = {"sums": self.sums} if self.sums else {}
        return BUILDERS[type(self.rule)](parameters, self.rule, self.state, self.in_backward, self.seed, **more)

    @property
    def rules(self) -> list[Rule]:
        """The rule of each group."""
        return [group.rule for group in self.groups] or [self.rule]

    @property
    def folds_into_momentum(self) -> bool:
        """Whether the gradients of several microbatches can be added to the momentum as they are made."""
        return all(is_heavy_ball(vars(rule)) for rule in self.rules)

    def with_rules(self, change: Callable[[Rule], Rule]) -> "LeanSettings":
        """The same with each rule changed."""
        groups = tuple(Group(group.names, change(group.rule)) for group in self.groups)
        return replace(self, rule=change(self.rule), groups=groups)


@dataclass(frozen=True)
class Settings:
    """`words` are joined by +: a form of the state (fp16, bf16, 8bit), sm3 or adafactor, no-gradient."""

    words: str

    def pick(self, known: Iterable[str]) -> str | None:
        """The one of the known words that was given, if any."""
        found = [word for word in self.words.split("+") if word in known]
        if len(found) > 1:
            raise ShoestringError(f"{found[0]} and {found[1]} are two forms of one thing: choose one")
        return found[0] if found else None


def options(task: Task) -> list[str]:
    """Words that the planner tries, the mildest first; refused with the reason if there is no lean form."""
    rule = lean_update(task).rule
    if not isinstance(rule, SGD | Adam):
        raise NoEffect(f"{type(rule).__name__} has factored state already")
    extra = [IN_BACKWARD] if runs_in_backward(task) else []
    # SGD has no second moment to factor: 8 bits are the smallest state.
    forms = ["8bit", "sm3+8bit", "adafactor"] if isinstance(rule, Adam) else ["8bit"]
    summed = [] if why_not_summed(task) else [f"8bit+{SUMS}"]
    return [*extra, *(f"{form}{more}" for form in forms for more in ("", *(f"+{word}" for word in extra))), *summed]


def runs_in_backward(task: Task) -> bool:
    """Whether a task's optimizer could update each weight as soon as its gradient is made."""
    return isinstance(lean_update(task).rule, SGD | Adam) and why_gradients_stay(task) is None


def risk(task: Task, words: str) -> Risk:
    """Exact in backward alone, but for weights of 16 bits, which are rounded otherwise than by PyTorch; 16- and 8-bit
    state was found neutral; factored second moments change the method."""
    settings = Settings(words)
    if settings.pick((*FACTORED, SUMS)):
        return Risk.APPROXIMATE
    is_narrow = any(parameter.element_size() < 4 for _, _, parameter in trainable(task.model))
    return Risk.NEUTRAL if is_narrow or settings.pick(NARROW) else Risk.EXACT


def evidence(task: Task, words: str) -> str:
    settings = Settings(words)
    if settings.pick([SUMS]):
        return f"{SUMS}: {SUMMED}"
    if factored := settings.pick(FACTORED):
        return f"{factored} is another method than {type(task.optimizer).__name__}; no run of ours compares them"
    form, rule = settings.pick(NARROW), type(lean_update(task).rule).__name__
    if not form:
        return ""
    told = f"SGD's momentum in 8 bits: {SHORT['8-bit state']}"
    return (
        told if (form, rule) == ("8bit", "SGD") else f"no run of ours has {rule}'s state in {form}; nearest is {told}"
    )


def refuses(task: Task, settings: Mapping[str, Any]) -> str:
    """Why the optimizer cannot run in backward beside another setting."""
    words = Settings(str(settings.get("optimizer", "")))
    if not words.pick([IN_BACKWARD]):
        return ""
    if settings.get("precision") == "fp16":
        return why_gradients_stay(task) or LOSS_SCALE
    if "microbatch" in settings and not changed(task, words).folds_into_momentum:
        return "no-gradient works with microbatches for SGD with heavy-ball momentum only"
    return ""


def effect(task: Task, words: str) -> Effect:
    """State scales with the number of moments and their bytes; PyTorch's temporaries of an update are not made."""
    settings, old = Settings(words), lean_update(task)
    new, before = changed(task, settings), moments(old.rule) * FORM_BYTES[old.state]
    state = moments(new.rule) * FORM_BYTES[new.state] / before if before else 1.0
    item_bytes = max(parameter.element_size() for parameter in task.model.parameters())
    summed = FORM_BYTES["8bit"] / item_bytes if settings.pick([SUMS]) else 1.0
    gradients = 0.0 if settings.pick([IN_BACKWARD]) else summed
    stays = gradients == 1  # else gradients are taken in the backward pass, by hooks that a tape would not call
    return Effect(gradients=gradients, state=state, update=0.0, static=stays)


FORM_BYTES = {"fp32": 4, "fp16": 2.02, "bf16": 2, "8bit": 1.02}  # of a value, scales included


def moments(rule: Any) -> int:
    """The numbers that an optimizer keeps per weight."""
    return 2 if isinstance(rule, Adam) else 0 if has_no_state(rule) else 1


def changed(task: Task, settings: Settings) -> LeanSettings:
    """The lean form of a task's optimizer, as the words say."""
    lean, kind = lean_update(task, settings.pick(FORMS)), settings.pick(FACTORED)
    return lean.with_rules(partial(factored_form, kind)) if kind else lean


def apply(task: Task, settings: Settings) -> Task:
    """A task -> the same task with a lean optimizer."""
    if unknown := set(settings.words.split("+")) - {*FORMS, *FACTORED, IN_BACKWARD, SUMS}:
        known = ", ".join([*NARROW, *FACTORED, IN_BACKWARD, SUMS])
        raise ShoestringError(f"there is no lean optimizer {min(unknown)!r}: use {known}, joined by +")
    lean, kind = changed(task, settings), settings.pick(FACTORED)
    if settings.pick([IN_BACKWARD]):
        refuse_in_backward(task)
        lean = replace(lean, in_backward=True)
    if settings.pick([SUMS]):
        refuse_sums(task)
        if kind or lean.in_backward:
            raise ShoestringError(f"{SUMS} is for SGD and Adam with gradients: leave out {kind or IN_BACKWARD}")
        lean = replace(lean, sums="8bit")
    if all(map(has_no_state, lean.rules)) and lean.state != "fp32" and not kind and not lean.in_backward:
        raise NoEffect(f"{lean.rule} keeps nothing that {lean.state} could make smaller: leave it out of the plan")
    return task.with_(optimizer=lean)


TECHNIQUE = Technique(Settings, apply, options, risk, refuses=refuses, effect=effect, evidence=evidence)


def lean_update(task: Task, state: str | None = None) -> LeanSettings:
    """A task and a form of its optimizer's state (by default the one that it has) -> the lean form of its optimizer."""
    if state is not None and state not in FORMS:
        raise ShoestringError(f"there is no form {state!r} of optimizer state: use {', '.join(FORMS)}")
    lean = task.optimizer if isinstance(task.optimizer, LeanSettings) else _lean(task)
    return lean if state is None else replace(lean, state=state)


def _lean(task: Task) -> LeanSettings:
    for name, _, parameter in trainable(task.model):
        if parameter.is_complex():
            raise ShoestringError(
                f"parameter {name} is {parameter.dtype}, which no lean optimizer updates: leave out optimizer and "
                "precision, or hold its real and imaginary parts in one real parameter (torch.view_as_complex)"
            )
    if type(task.optimizer) in BUILDERS:
        return LeanSettings(task.optimizer)
    groups = groups_of(task)
    # Groups stay apart also if their rules are equal: a scheduler may have a learning rate for each.
    covers_all = sum(len(group.names) for group in groups) == len(list(trainable(task.model)))
    return LeanSettings(groups[0].rule, groups=() if len(groups) == 1 and covers_all else groups)


def factored_form(kind: str, rule: Any) -> SM3 | Adafactor:
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
