"""One of several processes is killed with SIGKILL: the others stop, and the run resumes to the same bits."""

import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import kills
import pytest
import torch

from shoestring.distributed import Lost, world

PATIENCE = 60  # seconds after which a process that lost another must have ended; twenty times that for a whole run
LOST = 3  # how it ends here
BEGUN = 20  # messages by which they have compared what they begin with, and there is a run to resume


def process(rank, size, meeting, folder, setting, fault):
    """One process of a session, from its fork to its end."""
    torch.set_num_threads(1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - warnings of runs that go on elsewhere
    if fault.get("rank") == rank:
        arm(fault)
    try:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
        kills.run(setting, folder, (Path(folder) / "record.json").exists())
    except Lost as error:
        assert "is gone" in str(error) and ("resume" in str(error) or fault.get("message", BEGUN) < BEGUN)
        os._exit(LOST)
    os._exit(0)


def arm(fault):
    """The process will die at a message, at a byte of a save, or at a call of the system's."""
    if "bytes" in fault:
        kills.die_after_bytes(fault["bytes"])
    if "call" in fault:
        kills.die_at_call(fault["call"])
    if "message" in fault:
        send, left = world.Group._all, [fault["message"]]

        def sending(self, numbers, operation):
            left[0] -= 1
            if left[0] < 0:
                kills.die()
            return send(self, numbers, operation)

        world.Group._all = sending


def session(folder, setting, size=2, **fault):
    """Runs all processes; -> how each ended. Those that were not killed must end soon after one that was."""
    with tempfile.TemporaryDirectory() as place:
        children = []
        for rank in range(size):
            child = os.fork()
            if not child:
                try:
                    process(rank, size, f"{place}/meet", str(folder), setting, fault)
                finally:
                    os._exit(1)
            children.append(child)
        if "seconds" in fault:
            time.sleep(fault["seconds"])
            os.kill(children[fault["rank"]], signal.SIGKILL)
        return ended(children)


def ended(children):
    """Waits for processes -> their exit codes. When one has ended, the others must soon."""
    codes, deadline = {}, time.monotonic() + 20 * PATIENCE
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                codes[child] = os.waitstatus_to_exitcode(status)
                deadline = min(deadline, time.monotonic() + PATIENCE)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                raise AssertionError("a process waits for one that has ended")
        time.sleep(0.01)
    return [codes[child] for child in children]


def check(setting, wanted, folder, seed):
    """Kills a random process of runs until so many kills are done; each run must end as one that was never killed
    -> how many did."""
    dice = random.Random(f"{setting} {seed}")
    kills.run(setting, str(folder / "alone"), resume=False)  # what torch imports late is imported before the forks
    began = time.monotonic()
    assert session(folder / "whole", setting) == [0, 0]
    lasted, whole = time.monotonic() - began, kills.remains(folder / "whole")
    killed = runs = 0
    while killed < wanted:
        here, faults = folder / f"killed{runs}", []
        while killed < wanted:
            rank = dice.randrange(2)
            choices = [{"message": dice.randrange(400)}, {"seconds": dice.uniform(0, lasted)}]
            choices += [{"bytes": dice.randrange(1, 60_000)}, {"call": dice.randrange(60)}] if rank == 0 else []
            faults.append({"rank": rank, **dice.choice(choices)})
            codes = session(here, setting, **faults[-1])
            if -signal.SIGKILL not in codes:
                break
            killed += 1
            assert codes[1 - rank] in (0, LOST, 1 if "seconds" in faults[-1] else LOST), (faults[-1], codes)
        assert session(here, setting) == [0, 0], faults
        found = kills.remains(here)
        different = {name for name in whole | found if whole.get(name) != found.get(name)}
        assert not different, f"{setting}, seed {seed}: after {faults}, {sorted(different)} differ"
        runs += 1
    return runs


def test_a_run_of_two_processes_survives_the_death_of_either(tmp_path):
    check("sparse in FP16", 3, tmp_path, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("setting", kills.SETTINGS)
def test_every_kind_of_run_survives_twenty_deaths(setting):
    with kills.quick_folder() as folder:
        check(setting, 20, Path(folder), seed=1)
