"""Layers that several models share: torch's own, with another initialisation."""

from torch import nn


class HeConv2d(nn.Conv2d):
    """A convolution that starts with weights of variance 2 / fan-out (He et al., 2015) and zero bias."""

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")
        if self.bias is not None:
            nn.init.zeros_(self.bias)
