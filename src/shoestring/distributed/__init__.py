"""Several processes that train one model: each steps on its share of the batch, and all update by the same gradient.

    world.py       the processes and the messages between them
    reduction.py   gradients, losses and errors of one step, added up over all of them
    digests.py     what must be the same in all of them, compared by hashes
"""

from .digests import check_same, digest
from .reduction import Together, together
from .world import ALONE, Lost, Pretended, World, joined

__all__ = ["ALONE", "Lost", "Pretended", "Together", "World", "check_same", "digest", "joined", "together"]
