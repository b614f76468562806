"""Are downsample layers more resilient to pooling (Barley, Fröning)? ResNet-18 on CIFAR-10, per convolution.

    python benchmarks/downsample_fidelity.py DATA [--batch 16] [--updates 20]

Of each convolution's input, the weight gradient's cosine with the exact one: from the K x K averages of the whole map,
as in the paper; and for the strided 1 x 1 convolutions of the shortcuts also from the averages of the pixels that they
read, x[::s, ::s], which is what Shoestring stores; beside it the bytes as a share of the whole map.
"""

import argparse
from statistics import fmean
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from shoestring.cli.job import RECIPE, load_job
from shoestring.kernels.pooling import expand, pool
from shoestring.planning.plan import Plan


def weight_gradient(conv, x, grad):
    geometry = (conv.stride, conv.padding, conv.dilation, False, (0, 0), 1)
    mask = [False, True, False]
    return (
        torch.ops.aten.convolution_backward(grad, x, conv.weight.detach(), None, *geometry, mask)[1].flatten().double()
    )


def averaged(x, k):
    return expand(pool(x, k), x.shape[2:], k) if min(x.shape[2:]) >= k else x


def averaged_where_read(x, k, stride):
    """Only the pixels that are read, averaged among themselves and put back where they were."""
    kept, out = x[:, :, ::stride, ::stride].contiguous(), torch.zeros_like(x)
    out[:, :, ::stride, ::stride] = averaged(kept, k)
    return out


def cosines(conv, x, grad, ks):
    """K -> the cosine from averages of the whole map and, of a layer that skips pixels, from those of what it reads."""
    exact, stride = weight_gradient(conv, x, grad), conv.stride[0]
    skips = conv.kernel_size == (1, 1) and stride > 1
    found = {}
    for k in ks:
        forms = [averaged(x, k)] + ([averaged_where_read(x, k, stride)] if skips else [])
        found[k] = [F.cosine_similarity(exact, weight_gradient(conv, form, grad), 0).item() for form in forms]
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--every", type=int, default=10)
    args, ks = parser.parse_args(), (2, 4)
    job = load_job(
        SimpleNamespace(**RECIPE | {"model": "resnet18", "tokens": None, "data": args.data, "batch": args.batch})
    )
    session = job.build(Plan())
    lean, model = session.lean, session.lean.model
    convs = {name: module for name, module in model.named_modules() if isinstance(module, nn.Conv2d)}
    seen = {name: [] for name in convs if name != "conv"}  # the stem's input is the batch

    def look(name):
        def hook(module, inputs, output):
            output.register_hook(lambda grad: seen[name].append(cosines(module, inputs[0].detach(), grad, ks)))

        return hook

    for number in range(args.updates + 1):
        hooks = [convs[name].register_forward_hook(look(name)) for name in seen] if number % args.every == 0 else []
        lean.step(session.data.read(0, number))
        for hook in hooks:
            hook.remove()
    print(f"{'':22}{'whole map':>20}{'only what is read':>20}\n{'':22}" + f"{'pool2':>10}{'pool4':>10}" * 2)
    for name, steps in seen.items():
        forms = len(steps[0][ks[0]])
        values = [fmean(step[k][form] for step in steps) for form in range(forms) for k in ks]
        print(f"{name:22}" + "".join(f"{value:10.3f}" for value in values))


if __name__ == "__main__":
    main()
