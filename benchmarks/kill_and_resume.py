"""Kills runs with SIGKILL 500 times, mid-save included, resumes them, and compares them with runs never killed.

    python benchmarks/kill_and_resume.py [--kills 500] [--seed 0]

Every file of a run but its record (which tells the time) must be the same to the byte.
"""

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "training"))

from kills import SETTINGS, Server, check, quick_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which runs are killed")
    args = parser.parse_args()
    kills = -(-args.kills // len(SETTINGS))
    began = time.monotonic()
    with Server() as server, quick_folder() as folder:
        for setting in SETTINGS:
            runs = check(server, setting, kills, Path(folder) / setting, args.seed)
            seconds = time.monotonic() - began
            print(
                f"{setting}: {kills} kills, {runs} runs, all the same to the byte ({seconds:.0f} s)",
                flush=True,
            )


if __name__ == "__main__":
    main()
