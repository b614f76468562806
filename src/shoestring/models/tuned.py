"""The learning rates that the paper found best for its networks (Sohoni et al., Tables 6 and 7), as multipliers."""

import re

# Percent of nonzeros -> multiplier, for WRN-28-2 and for the DynamicConv Transformer of width 512.
WRN_NONZERO = {100: 0.5, 50: 0.5, 40: 1.0, 30: 1.0, 20: 1.0, 10: 0.5, 5: 0.5}
DYNAMICCONV_NONZERO = {100: 1.0, 50: 2.0, 40: 2.0, 30: 4.0, 20: 4.0, 10: 8.0, 5: 8.0}
# Dense networks of other sizes: (depth, width) of a WideResNet, width of the DynamicConv Transformer.
WRN_DENSE = {(22, 2): 0.5, (16, 2): 0.5, (10, 2): 0.5, (28, 1.5): 0.5, (28, 1): 0.5, (28, 0.75): 0.5, (28, 0.5): 1.0}
DYNAMICCONV_DENSE = {512: 1.0, 384: 1.0, 256: 2.0, 192: 2.0, 128: 4.0}


def learning_rate_multiplier(model: str, nonzero: float = 100, width: int | None = None) -> float:
    """A built-in network, its percent of nonzeros and its width -> the factor on its learning rate: that of the nearest
    one that was tuned; 1 if none is near.

    >>> learning_rate_multiplier("wrn-28-2"), learning_rate_multiplier("wrn-28-2", nonzero=30)
    (0.5, 1.0)
    """
    if wide := re.fullmatch(r"wrn-(\d+)-(\d+(?:\.\d+)?)", model):
        size = int(wide[1]), float(wide[2])
        if size == (28, 2.0):
            return _nearest(WRN_NONZERO, nonzero)
        return WRN_DENSE.get(size, 1.0) if nonzero == 100 else 1.0
    if model == "dynamicconv-iwslt":
        # Fewer weights want a higher rate, whichever way they are fewer. Both factors together are too much: 30% of a
        # network of width 128 learns faster at 4 times the rate than at 16 times or once (the study table7).
        return max(_nearest(DYNAMICCONV_NONZERO, nonzero), _nearest(DYNAMICCONV_DENSE, width or 512))
    return 1.0


def _nearest(tuned: dict[int, float], size: float) -> float:
    return tuned[min(tuned, key=lambda known: abs(known - size))]
