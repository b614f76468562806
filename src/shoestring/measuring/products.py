"""Whether PyTorch's matrix products in BF16 run here: on an Intel Xeon with AMX those of torch 2.13 end the process by
an illegal instruction of oneDNN's, with Shoestring or without, so only a try in another process tells."""

import os
import subprocess
import sys
from pathlib import Path

VARIABLE, WITHOUT_AMX = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16"
TRY = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); x @ x"


def announces_amx() -> bool:
    try:
        return "amx_tile" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def products_crash() -> bool:
    """Tried only where the CPU announces AMX, for it takes as long as importing torch."""
    if not announces_amx():
        return False
    return subprocess.run([sys.executable, "-c", TRY], capture_output=True, timeout=120).returncode < 0


def without_amx() -> None:
    """For this process and those that it starts; before oneDNN's first operator, at which it reads this."""
    os.environ.setdefault(VARIABLE, WITHOUT_AMX)
