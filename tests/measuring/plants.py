"""Allocations of known size for the heap meter's fresh process; as a script it writes readings of all."""

import ctypes
import json
import sys
import threading
from pathlib import Path

libc = ctypes.CDLL(None)
POINTER, SIZE = ctypes.c_void_p, ctypes.c_size_t
for name, arguments in {
    "malloc": [SIZE],
    "calloc": [SIZE, SIZE],
    "realloc": [POINTER, SIZE],
    "memalign": [SIZE, SIZE],
    "aligned_alloc": [SIZE, SIZE],
    "valloc": [SIZE],
    "pvalloc": [SIZE],
    "free": [POINTER],
}.items():
    getattr(libc, name).argtypes = arguments
    getattr(libc, name).restype = None if name == "free" else POINTER
libc.posix_memalign.argtypes = [POINTER, SIZE, SIZE]
BLOCK = 1_000_000  # bytes; below the size from which a page's rounding could be mistaken for a lost block


def posix_memalign():
    block = ctypes.c_void_p()
    assert libc.posix_memalign(ctypes.byref(block), 64, BLOCK) == 0
    return block.value


def held():
    libc.malloc(BLOCK)


def dropped():
    libc.free(libc.malloc(BLOCK))


def grown_and_shrunk():
    block = libc.realloc(libc.malloc(BLOCK), 3 * BLOCK)
    libc.realloc(block, BLOCK)


def two_in_turn():
    dropped()
    dropped()


def two_at_once():
    first, second = libc.malloc(BLOCK), libc.malloc(BLOCK)
    libc.free(first)
    libc.free(second)


def eight_threads():
    barrier = threading.Barrier(8)

    def work():
        for _ in range(1000):
            libc.free(libc.malloc(100))
        block = libc.malloc(BLOCK)
        barrier.wait()
        libc.free(block)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def tensor(numel):
    import torch

    return torch.ones(numel)


def fails():
    raise KeyError("planted")


KIN = {
    "malloc": lambda: libc.malloc(BLOCK),
    "calloc": lambda: libc.calloc(1000, BLOCK // 1000),
    "realloc": lambda: libc.realloc(None, BLOCK),
    "memalign": lambda: libc.memalign(64, BLOCK),
    "aligned_alloc": lambda: libc.aligned_alloc(64, BLOCK),
    "posix_memalign": posix_memalign,
    "valloc": lambda: libc.valloc(BLOCK),
    "pvalloc": lambda: libc.pvalloc(BLOCK),
}
PLANTS = (held, dropped, grown_and_shrunk, two_in_turn, two_at_once, eight_threads)


def readings():
    from shoestring.measuring.heap import measure_preloaded

    runs = {plant.__name__: plant for plant in PLANTS} | KIN
    runs |= {f"{name} and free": lambda give=give: libc.free(give()) for name, give in KIN.items()}
    found = {}
    for name, run in runs.items():
        run()
        reading = measure_preloaded(run)
        found[name] = (reading.peak_bytes, reading.end_bytes)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(readings()))
