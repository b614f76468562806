"""Runs that are killed with SIGKILL, at random moments or at a precise byte of a save, and resumed.

A server process has torch loaded and forks a process for each session of a run, so that one takes
milliseconds to start. `check` kills, resumes and compares with a run that was never killed.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
CALLS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir")  # what a save asks of the system
SETTINGS = (
    "momentum", "adam in microbatches", "checkpoints and masks", "sparse in FP16", "8-bit state", "stochastic rounding"
)  # fmt: skip
PLANS = {
    "nonzero 50": {"nonzero": 50}, "fp16": {"precision": "fp16"}, "bf16": {"precision": "bf16"},
    "8bit": {"optimizer": "8bit"}, "16-bit state": {"optimizer": "bf16"}, "no-gradient": {"optimizer": "no-gradient"},
    "sums in 8 bits": {"optimizer": "8bit+8bit-gradient", "microbatch": 2},
    "sm3": {"optimizer": "sm3+8bit"}, "adafactor": {"optimizer": "adafactor"},
    **{name: {"checkpoint": name} for name in ("no-bn", "residual-1*", "residual-2*", "optimal", "every-2")},
    **{name: {"activations": name} for name in ("offload", "half", "masks", "pool2", "int8", "int2", "adaptive-1MB")},
    "microbatch 2": {"microbatch": 2},
}  # fmt: skip
FACTORED = ("sm3", "adafactor")  # of Adam's second moment
EACH = tuple(f"{name} by {how}" for name in PLANS for how in ("SGD", "Adam") if how == "Adam" or name not in FACTORED)


def quick_folder() -> tempfile.TemporaryDirectory:
    """A folder in memory where there is one: a killed process loses nothing that it has written to either."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)


# -- the runs -----------------------------------------------------------------------------------------------
def run(setting: str, folder: str, resume: bool) -> None:
    """One session of a run, from where the last one ended to its own end."""
    import torch
    from small import Net, Noise, right_answers, task

    from shoestring import Adam, Plan, apply
    from shoestring.techniques import sparsity
    from shoestring.training.loop import train
    from shoestring.training.schedules import schedule

    how = {"run": folder, "resume": resume, "epochs": 6, "evaluation": right_answers(), "save_every": 2}
    if setting in EACH:
        name, optimizer = setting.split(" by ")
        data = Noise(size=240) if "activations" in PLANS[name] else Noise()  # what is small is stored as it is
        start = task(Adam() if optimizer == "Adam" else None, batch=data.read(0, 0))
        train(apply(start, Plan(**PLANS[name])), data, **how)
    elif setting == "momentum":
        train(task(), Noise(), schedule=schedule("paper", 30), **how)
    elif setting == "adam in microbatches":
        lean = apply(task(Adam(weight_decay=0.1, decoupled=True), clip=1.0), Plan(microbatch=2))
        loader = torch.utils.data.DataLoader(pictures(), batch_size=6, shuffle=True)
        train(lean, loader, schedule=schedule("inverse-sqrt", 30), average=3, **how)
    elif setting == "sparse in FP16":
        sparse = sparsity.apply(task(), sparsity.Settings(50, frequency_multiplier=100))
        train(apply(sparse, Plan(precision="fp16", microbatch=3)), Noise(), average=3, **how)
        assert sparse.after_update[0].times == 11, "every 1, 2, 4 and 8 updates of 30"
    elif setting == "8-bit state":
        train(apply(task(Adam()), Plan(optimizer="8bit", checkpoint="residual-1")), Noise(), **how)
    elif setting == "stochastic rounding":  # of activations, in microbatches that are large enough to be compressed
        data = Noise(size=240)
        taped = task(model=Net(dropout=0.0), batch=data.read(0, 0), static_graph=True)
        lean = apply(taped, Plan(activations="int4,*:batch_norm=int2", microbatch=120))
        train(lean, data, **how)
        assert lean.stepper.tapes.length or resume, lean.stepper.tapes.reason
    else:
        small, masks = task(), torch.Generator().manual_seed(4)
        small = small.with_(after_update=(Rewiring(small.model.head.weight, masks),))
        lean = apply(small, Plan(checkpoint="residual-1"))
        train(lean, Noise(), generators={"masks": masks}, **how)


def pictures():
    from small import Noise

    images, labels = Noise(size=30).read(0, 0)
    return list(zip(images, labels, strict=True))


class Rewiring:
    """As dynamic sparsity does it: every fourth update, other weights are drawn and set to zero."""

    def __init__(self, weight, generator):
        import torch

        self.weight, self.generator, self.updates = weight, generator, 0
        self.mask = torch.ones(weight.shape, dtype=torch.uint8)

    def __call__(self, stepper):
        import torch

        self.updates += 1
        if self.updates % 4 == 0:
            self.mask = (torch.rand(self.weight.shape, generator=self.generator) < 0.8).to(torch.uint8)
        self.weight.data.mul_(self.mask)

    def state(self):
        return {"tensors": {"mask": self.mask}, "values": {"updates": self.updates}}

    def restore(self, state):
        self.mask, self.updates = state["tensors"]["mask"], state["values"]["updates"]


# -- in a session's own process -----------------------------------------------------------------------------
def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_after_bytes(left: int) -> None:
    """SIGKILL when this many bytes of saves are written, be it in the middle of a tensor."""
    from shoestring.runs.tensorfile import HashedFile

    write = HashedFile.write

    def writing(self, data):
        nonlocal left
        view = memoryview(data)
        if len(view) >= left:
            write(self, view[:left])
            die()
        left -= len(view)
        write(self, view)

    HashedFile.write = writing


def die_at_call(left: int) -> None:
    """SIGKILL just before that call of the system's among CALLS."""

    def dying(call):
        def called(*args, **kwargs):
            nonlocal left
            left -= 1
            if left < 0:
                die()
            return call(*args, **kwargs)

        return called

    for name in CALLS:
        setattr(os, name, dying(getattr(os, name)))


def session(job: dict) -> None:
    if "bytes" in job:
        die_after_bytes(job["bytes"])
    if "call" in job:
        die_at_call(job["call"])
    run(job["setting"], job["folder"], (Path(job["folder"]) / "record.json").exists())


def serve() -> None:
    """Jobs as lines of JSON -> the id of the process of each and, asked to wait for it, how it ended."""
    import torch

    torch.set_num_threads(1)  # a process that has threads cannot be forked safely
    for setting in sys.argv[1:]:
        with quick_folder() as folder:
            run(setting, folder, resume=False)  # so that what torch imports late is imported once
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                session(json.loads(line))
                code = 0
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)
        sys.stdin.readline()  # until then no other process gets its id, even if it has ended
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


# -- in the test's process ----------------------------------------------------------------------------------
class Server:
    """Starts sessions of some settings, kills them, and says how they ended."""

    def __init__(self, settings=SETTINGS):
        self.settings = settings

    def __enter__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen([sys.executable, __file__, *self.settings], cwd=HERE, **pipes)
        assert self.process.stdout.readline() == "ready\n"
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        self.process.wait()

    def session(self, seconds: float | None = None, **job) -> bool:
        """Runs a session; kills it after some seconds, if told -> whether it was killed before its end."""
        self._send(json.dumps(job))
        child = int(self.process.stdout.readline())
        if seconds is not None:
            time.sleep(seconds)
            os.kill(child, signal.SIGKILL)
        self._send("wait")
        code = int(self.process.stdout.readline())
        assert code in (0, -signal.SIGKILL), f"the session ended with {code}"
        return code != 0

    def _send(self, line: str) -> None:
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()


TIMED = ("record.json", "measures.jsonl", ".lock")


def remains(folder: Path) -> dict[str, bytes]:
    """All that a run left, but for its record and its measures, which tell the time."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name not in TIMED}


def check(server: Server, setting: str, kills: int, folder: Path, seed: int) -> int:
    """Kills runs of a setting at least `kills` times; each must end as one that was never killed -> runs."""
    dice = random.Random(f"{setting} {seed}")
    began = time.monotonic()
    server.session(setting=setting, folder=str(folder / "whole"))
    lasted = time.monotonic() - began
    whole = remains(folder / "whole")
    save_bytes = sum(len(data) for name, data in whole.items() if "/update-0000000030/" in f"/{name}")
    killed = runs = 0
    while killed < kills:
        here = folder / f"killed{runs}"
        faults = []
        while killed < kills:
            fault = dice.choice(
                [
                    {"seconds": dice.uniform(0, lasted / 3)},
                    {"bytes": dice.randrange(1, 3 * save_bytes)},
                    {"call": dice.randrange(60)},
                ]
            )
            faults.append(fault)
            if not server.session(setting=setting, folder=str(here), **fault):
                break
            killed += 1
        server.session(setting=setting, folder=str(here))
        found = remains(here)
        different = {name for name in whole | found if whole.get(name) != found.get(name)}
        assert not different, f"{setting}, seed {seed}: after {faults}, {sorted(different)} differ"
        runs += 1
    return runs


if __name__ == "__main__":
    serve()
