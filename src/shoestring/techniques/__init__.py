"""The techniques, in the order in which a plan applies them: the only list of them.

| word | module | what it does |
|---|---|---|
| `nonzero` | sparsity/ | sparse weights, rewired while training |
| `precision` | precision/ | FP16 or BF16 for all tensors, no FP32 copy |
| `optimizer` | optimizer/ | 8- and 16-bit state, factored state, optimizer in backward |
| `checkpoint` | checkpoint/ | activation checkpointing |
| `activations` | activations/ | saved activations offloaded, as 1-bit masks, averaged, or in 16 to 2 bits |
| `microbatch` | microbatch/ | gradient accumulation |
| `shard` | shard/ | parameters, gradients and optimizer state in shards over several processes |

The card of a technique is docs/techniques/MODULE.md.
A plan's fields, the flags of the command line and `registry.REGISTRY` are made from `WORDS`. A module has a `Settings`
dataclass and a record, `TECHNIQUE`. Nothing here imports torch, so that `shoestring --help` does not wait for it.
"""

from .words import COUNT, NAMES, NUMBER, PERCENT, SEED, SWITCH, TEXT, Word, one_of

WORDS = (
    Word(
        "nonzero", "sparsity", "percentage of nonzero weights: 30 is a sparsity of 70%", "P",
        {"nonzero": PERCENT, "method": TEXT, "layers": NAMES, "fraction": NUMBER, "fraction_multiplier": NUMBER,
         "frequency_multiplier": NUMBER, "updates": COUNT, "positions": TEXT, "seed": SEED},
        nothing=100,
    ),
    Word(
        "precision", "precision", "the dtype in which numbers are stored: fp32, fp16 or bf16", "F",
        {"form": one_of("fp32", "fp16", "bf16")}, nothing="fp32",
    ),
    Word(
        "optimizer", "optimizer",
        "lean forms of SGD and Adam: 8bit, fp16, bf16, no-gradient, 8bit-gradient, sm3, adafactor, joined by +", "O",
        {"words": TEXT},
    ),
    Word(
        "checkpoint", "checkpoint",
        "what is recomputed: none, no-bn, every-M, residual-M, residual-M*, residual-M**, optimal or optimal-SIZE",
        "C",
        {"strategy": TEXT, "blocks": NAMES}, nothing="none",
    ),
    Word(
        "activations", "activations",
        "how saved activations are stored: offload, half, masks, pool2, int4, pool8+int2, adaptive, or rules", "A",
        {"rules": TEXT},
    ),
    Word(
        "microbatch", "microbatch", "gradient accumulation: examples (or tokens) at a time", "N",
        {"size": COUNT, "by": TEXT, "simulated": SWITCH},
    ),
    Word(
        "shard", "shard", "fsdp (each of several processes holds its shard of the model) or none", "BY",
        {"by": one_of("none", "fsdp")}, nothing="none", of_several=True,
    ),
)  # fmt: skip
