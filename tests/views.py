"""Maps as views of others, with the strides that users' code gives them: name -> a function of a contiguous map."""

import torch

LAST = torch.channels_last
VIEWS = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=LAST),
    "half of contiguous": lambda x: x.repeat(1, 2, 1, 1).chunk(2, 1)[1],
    "half of channels_last": lambda x: x.repeat(1, 2, 1, 1).contiguous(memory_format=LAST).chunk(2, 1)[1],
    "rows of channels_last": lambda x: x.repeat(1, 1, 2, 1).contiguous(memory_format=LAST)[:, :, ::2],
    "columns": lambda x: x.repeat(1, 1, 1, 2)[..., ::2],
    "turned": lambda x: x.transpose(2, 3),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).unflatten(2, x.shape[2:]),
    "samples last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}
