"""The paper's rules on other networks and strategies, against counts that are made another way.

`Counter` knows a WideResNet as a list of (x, y), the sizes of each block's input and output, and writes rules
1 and 2 down for a block's six operations; there is no graph in it.
"""

import math
from itertools import cycle, pairwise

import pytest

from shoestring.paper import paper_profile


class Counter:
    """Activation bytes of one image of a WideResNet with identity shortcuts on CIFAR-10, by strategy."""

    image = 3 * 32 * 32

    def __init__(self, depth: int, width: float, element_bytes: int) -> None:
        self.b = element_bytes
        self.blocks: list[tuple[int, int]] = []
        channels, side = 16, 32
        for group in range(3):
            for index in range((depth - 4) // 6):
                x = channels * side**2
                channels, side = round(16 * 2**group * width), side // 2 if group and not index else side
                self.blocks.append((x, channels * side**2))
        self.last = self.blocks[-1][1]  # the last block's output
        self.channels = channels

    def states(self, before: float, x: int, y: int, on_the_fly: bool) -> list[float]:
        """Bytes at each of a block's operations, backwards, with `before` bytes of other values there."""
        b, mask_x, mask_y = self.b, x / 8, y / 8
        r1 = 0 if on_the_fly else b * x + mask_x  # what is kept of the first BN + ReLU throughout the block
        return [
            before + b * (x + y + y) + mask_y + r1 + b * y,  # conv2: x, h, r2; gradient of the output
            before + b * (x + y) + mask_y + r1 + b * 2 * y,  # relu2: x, h; gradients of r2 and shortcut
            before + b * (x + y) + r1 + b * 2 * y,  # bn2
            before + b * (x + x) + mask_x + b * 2 * y,  # conv1: x, r1; gradients of h and shortcut
            before + b * x + mask_x + b * (x + y),  # relu1
            before + b * x + b * (x + y),  # bn1
        ]

    def all_of(self, blocks: list[tuple[int, int]]) -> float:
        return sum(self.b * 2 * (x + y) + (x + y) / 8 for x, y in blocks)

    def tail(self, before: float) -> list[float]:
        """BN, ReLU, average, classifier after the last block."""
        small = self.b * (self.channels + 10 + 10)
        return [before + self.b * self.last + self.last / 8 + self.b * self.last, before + small]

    def stem(self, blocks: list[tuple[int, int]]) -> list[float]:
        return [self.b * (self.image + blocks[0][0])]

    def none(self) -> float:
        start = self.b * self.image
        states = self.tail(start + self.all_of(self.blocks))
        for index, (x, y) in enumerate(self.blocks):
            states += self.states(start + self.all_of(self.blocks[:index]), x, y, on_the_fly=False)
        return max(states + self.stem(self.blocks))

    def no_bn(self) -> float:
        start = self.b * self.image
        states = self.tail(start + self.b * sum(x + y for x, y in self.blocks))
        for index, (x, y) in enumerate(self.blocks):
            before = start + self.b * sum(x + y for x, y in self.blocks[:index])
            states += self.states(before, x, y, on_the_fly=True)
        return max(states + self.stem(self.blocks))

    def residual(self, m: int, starred: bool) -> float:
        """The image and each segment's input are kept, but the first's input is made again from the image."""
        kept = self.b * self.image
        states = self.stem(self.blocks)
        for first in range(0, len(self.blocks), m):
            segment = self.blocks[first : first + m]
            for index, (x, y) in enumerate(segment):
                earlier = segment[:index]
                inside = self.b * sum(x for x, _ in earlier) if starred else self.all_of(earlier)
                states += self.states(kept + inside, x, y, on_the_fly=starred)
            kept += self.b * segment[0][0] if first else 0
        return max(states + self.tail(kept))

    def every(self, m: int) -> float:
        """Operations as (kind, input, shortcut's source, output), values by number; sets of needs."""
        sizes, operations = [self.image], []  # elements of each value; operations

        def run(kind: str, value: int, size: int, skip: int | None = None) -> int:
            sizes.append(size)
            operations.append((kind, value, skip, len(sizes) - 1))
            return len(sizes) - 1

        x = run("conv", 0, self.blocks[0][0])
        for x_size, y in self.blocks:
            r = run("relu", run("bn", x, x_size), x_size)
            r = run("relu", run("bn", run("conv", r, y), y), y)
            x = run("add", run("conv", r, y), y, skip=x)
        r = run("relu", run("bn", x, self.last), self.last)
        run("loss", run("linear", run("pool", r, self.channels), 10), 10)

        def needs(operation: tuple) -> set[tuple[str, int]]:
            kind, value, _, output = operation
            if kind in ("add", "pool"):
                return set()
            return {("bits", output)} if kind == "relu" else {("value", output if kind == "loss" else value)}

        def size(thing: tuple[str, int]) -> float:
            return sizes[thing[1]] * (self.b if thing[0] == "value" else 1 / 8)

        nodes = [index for index, operation in enumerate(operations) if needs(operation)]
        cuts = [*sorted({0, *nodes[m - 1 :: m]}), len(operations)]
        made_by = {operation[3]: index for index, operation in enumerate(operations)}
        kept: set[tuple[str, int]] = set()
        states = []
        for start, end in pairwise(cuts):
            wanted = [value for operation in operations[start:end] for _, value in needs(operation)]
            seen = set()
            while wanted:  # all that the segment's needs are made of, back to what is older than the segment
                value = wanted.pop()
                if value in seen:
                    continue
                seen.add(value)
                if made_by.get(value, -1) < start:
                    kept.add(("value", value))
                else:
                    wanted += [v for v in operations[made_by[value]][1:3] if v is not None]
            for index in range(start, end):
                there = kept.union(*(needs(operation) for operation in operations[start : index + 1]))
                output = operations[index][3]
                skips = [o for o in operations if o[2] is not None and o[2] < output < o[1]]
                gradients = sizes[output] + sum(sizes[skip[3]] for skip in skips)
                states.append(sum(map(size, there)) + self.b * gradients)
        return max(states)

    def count(self, strategy: str) -> float:
        if strategy in ("none", "no-bn"):
            return self.none() if strategy == "none" else self.no_bn()
        kind, m = strategy.rstrip("*").split("-")
        return self.every(int(m)) if kind == "every" else self.residual(int(m), strategy.endswith("*"))


STRATEGIES = (
    *("none", "no-bn", "every-1", "every-2", "every-4", "every-7", "every-10", "every-23", "every-999"),
    *("residual-1", "residual-2", "residual-3", "residual-4", "residual-5", "residual-99"),
    *("residual-1*", "residual-2*", "residual-3*", "residual-4*", "residual-5*", "residual-99*"),
)


@pytest.mark.parametrize("name", ["10-1", "16-2", "22-0.75", "28-0.5", "28-10", "40-4"])
def test_activations_of_any_wide_resnet_are_as_counted_without_a_graph(name):
    depth, width = int(name.split("-")[0]), float(name.split("-")[1])
    precisions = cycle([("fp32", 4), ("fp16", 2)])
    for strategy, (precision, element_bytes) in zip(STRATEGIES, precisions, strict=False):
        profile = paper_profile(f"wrn-{name}", batch=8, precision=precision, checkpoint=strategy)
        assert profile.activation_bytes == 8 * Counter(depth, width, element_bytes).count(strategy), strategy


def test_a_network_of_three_blocks_by_hand():
    """wrn-10-1: maps of 16,384 in and out of block 1, 8,192 out of block 2, 4,096 out of block 3."""
    kept = 3_072 + 4 * 16_384 + 2 * (16_384 + 8_192) + 2 * (8_192 + 4_096) + 4_096  # image, blocks, output
    mask_bits = 2 * 16_384 + (16_384 + 8_192) + (8_192 + 4_096) + 4_096
    profile = paper_profile("wrn-10-1", batch=1)
    assert profile.forward_bytes == 4 * kept + mask_bits // 8
    assert profile.backward_bytes == 4 * 4_096

    starred = paper_profile("wrn-10-1", batch=1, checkpoint="residual-1*")  # at conv2 of block 1
    assert starred.activation_bytes == 4 * (3_072 + 16_384 + 16_384 + 16_384 + 16_384) + 16_384 // 8


def test_flops_of_a_network_of_three_blocks_by_hand():
    channels, sides = (3, 16, 16, 16, 32, 32, 64, 64), (32, 32, 32, 16, 16, 8, 8)
    products = [2 * 9 * i * o * side**2 for (i, o), side in zip(pairwise(channels), sides, strict=True)]
    normed = 2 * 16_384 + (16_384 + 8_192) + (8_192 + 4_096) + 4_096
    joined = 16_384 + 8_192 + 4_096
    flops = paper_profile("wrn-10-1", batch=1, checkpoint="residual-1").flops
    head = 2 * 64 * 10
    assert flops["forward"] == sum(products) + 9 * normed + joined + 4_096 + head + 4 * 10
    inputs = 16_384 + 16_384 + 8_192  # x1, x2, x3 have two readers, whose gradients are added
    assert flops["backward"] == (2 * sum(products) - products[0] + 10 * normed + inputs + 4_096 + 2 * head + 3 * 10)
    redone = products[0] + products[1] + products[3] + products[5]  # the stem, and each block's first
    assert flops["recompute"] == redone + 3 * (normed - 4_096)


@pytest.mark.parametrize("nonzero", [5, 30, 62.5])
def test_sparse_weights_are_nonzeros_and_one_index_in_compressed_rows(nonzero):
    profile = paper_profile("wrn-10-1", batch=1, nonzero=nonzero, precision="fp16")
    sparse = [(16, 16), (16, 16), (32, 16), (32, 32), (64, 32), (64, 64)]  # output and input channels
    counts = [round(c_out * c_in * 9 * nonzero / 100) for c_out, c_in in sparse]
    index = sum(
        math.ceil((n * math.ceil(math.log2(9 * i)) + (o + 1) * math.ceil(math.log2(9 * o * i + 1))) / 8)
        for n, (o, i) in zip(counts, sparse, strict=True)
    )
    norms = 16 + 16 + 16 + 32 + 32 + 64 + 64  # channels: scale, shift, mean and variance each, FP32
    values = 2 * sum(counts) + 2 * (432 + 650) + 4 * 4 * norms
    assert profile.model_bytes == values + index
    assert profile.optimizer_bytes == 2 * values
