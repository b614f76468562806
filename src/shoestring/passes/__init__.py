"""What happens inside one forward and backward pass: the machinery that the techniques share.

    who enters            step.Stepper.one_pass: a task's contexts, around the pass of each microbatch
    mode.py               LeanMode, a function mode: answers the model's calls by operations that save less
      arguments.py          the arguments of PyTorch's functions by name
      patterns.py           which batch norms may be fused, learned from one forward pass on fake tensors
      placeholders.py       what a fused batch norm and ReLU return until the convolution comes
      functions.py          the autograd functions; each calls `store` before it computes
      layers.py             dense convolution and linear layers, as `functions` needs them (protocol `Product`)
      sparse_layers.py      the sparse ones, and the functions that sparse layers call
      widened.py            the other products of 16-bit tensors, computed in FP32
    saved_tensors.py      store(tensor) -> take(): who decides how a saved tensor is stored
    regions.py            Region: a checkpointed part of the pass; stores tickets, recomputes when one is taken
      checksums.py          whether the recomputed tensors are those of the first run
      states.py buffers.py  random generators, autocast and buffers, as they were at the first run
      tape.py               regions of m operations in place of modules
    sweeps.py             blocks that run a few samples at a time; batch norm's sums are learned before
    patching.py           a module whose calls go elsewhere for the length of a context
    switches.py hooks.py  a model's own checkpointing and a user's forward hooks, beside ours
    boundary.py           the hooks by which a 16-bit model takes and gives FP32

Who calls whom, for one block of batch norm, ReLU and convolution under `checkpoint="residual-1*"`:

    forward    the patched block  -> Region.call               saves the block's input; its store is now the innermost
               F.batch_norm       -> LeanMode._norm            computes statistics, returns a placeholder
               F.relu             -> LeanMode._relu            returns another placeholder
               F.conv2d           -> LeanMode._product         knows what the placeholder stands for
                                  -> norm_relu_product -> store(x) -> Region._ticket        x itself is not kept
                                  -> NormReluProduct.forward -> Convolution.forward -> kernels/
    backward   autograd           -> NormReluProduct.backward -> Ticket.take -> Region.take
                                  -> Region._recompute         the forward lines once more, in phase RECOMPUTE, with the
                                                               same statistics, until all tickets have their tensors
                                  -> Convolution.weight_gradient, Convolution.input_gradient, batch_norm_backward

ARCHITECTURE.md follows a whole step ("One lean step, hop by hop") and says why PyTorch is intercepted in three ways.
"""
