"""Plans a Llama of 7 billion parameters, on the meta device, for 24 GB and for 16 GB; prints plan and seconds of CPU.

python benchmarks/llama.py --budget 24GB 16GB --risk approximate

The table is in docs/planning_time.md.
"""

import argparse
import time

import torch
import transformers

from shoestring import Adam, NoPlanFits, Task
from shoestring.planning.search import plan
from shoestring.rates import Rates
from shoestring.units import format_bytes

RATES = Rates(1e11, 8e10, 1e10, 1e-5)  # of no machine in particular: this one could not train it
EXAMPLES, LENGTH = 4, 512


def llama() -> Task:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False))
    ids = torch.randint(model.config.vocab_size, (EXAMPLES, LENGTH))
    return Task(model, lambda model, batch: model(input_ids=batch, labels=batch).loss, ids, Adam(), name="llama")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", nargs="+", default=["24GB", "16GB"])
    parser.add_argument("--risk", default="approximate")
    args = parser.parse_args()
    torch.set_num_threads(1)
    task = llama()
    print(f"{sum(parameter.numel() for parameter in task.model.parameters()):,} parameters")
    for budget in args.budget:
        traced: list[str] = []
        start = time.process_time()
        try:
            found = plan(task, budget, args.risk, RATES, progress=traced.append)
            words = ", ".join(f"{name} {value}" for name, value in found.techniques().items())
            told = f"{words}: {format_bytes(found.predicted_peak_bytes)}"
        except NoPlanFits as error:
            told = str(error)
        print(f"{budget}: {told}; {time.process_time() - start:.0f} s of CPU, {len(traced)} traces", flush=True)


if __name__ == "__main__":
    main()
