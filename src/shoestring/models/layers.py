"""Layers that several models share: torch's own with a different initialisation."""

from torch import nn


class HeConv2d(nn.Conv2d):
    """A convolution initialised with weights of variance 2 / fan-out (He et al., 2015) and zero bias."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class XavierLinear(nn.Linear):
    """A linear layer initialised with Glorot and Bengio's uniform weights, times `gain`, and zero bias."""

    def __init__(self, inputs: int, outputs: int, gain: float = 1.0) -> None:
        self.gain = gain  # before torch's constructor, which resets the parameters
        super().__init__(inputs, outputs)

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.weight, self.gain)
        nn.init.zeros_(self.bias)
