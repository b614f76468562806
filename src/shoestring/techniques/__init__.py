"""The techniques, in the order in which a plan applies them."""

from . import activations, checkpoint, microbatch, optimizer, precision, sparsity
from .technique import Technique

REGISTRY = (
    Technique(
        "nonzero", sparsity.Settings, sparsity.apply, sparsity.options, sparsity.risk, sparsity.WARNING,
        degree=sparsity.degree, effect=sparsity.effect,
    ),
    Technique(
        "precision", precision.Settings, precision.apply, precision.options, precision.risk,
        alike=precision.alike, least=precision.least,
    ),
    Technique(
        "optimizer", optimizer.Settings, optimizer.apply, optimizer.options, optimizer.risk,
        refuses=optimizer.refuses, effect=optimizer.effect,
    ),
    Technique("checkpoint", checkpoint.Settings, checkpoint.apply, checkpoint.options, price=checkpoint.price),
    Technique(
        "activations", activations.parse, activations.apply, activations.options, activations.risk,
        refuses=activations.refuses, least=activations.least, price=activations.price,
    ),
    Technique(
        "microbatch", microbatch.Settings, microbatch.apply, microbatch.options, microbatch.risk,
        degree=microbatch.degree, effect=microbatch.effect,
    ),
)  # fmt: skip
