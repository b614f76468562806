"""Several processes that train one model: each steps on its share of the batch, and all update by the same gradient.

world.py       the processes and the messages between them; joining.py how they meet
agreement.py   errors and texts of one that are those of all
reduction.py   gradients, losses and errors of one step, added up over all of them
sharding.py    FSDP2; pretended_shards.py the same in a trace
synchronised.py  batch norm over all of them
voice.py       one line of one of them
digests.py     what must be the same in all of them, compared by hashes
"""

from .agreement import agreed, by_first, leaving_word
from .digests import check_same, digest
from .joining import is_restarted, joined
from .pretended_shards import pretended_shards
from .reduction import Together, together
from .sharding import (
    Lending,
    empty_shard,
    first_row,
    is_sharded,
    largest_part,
    local,
    over_parts,
    part_like,
    part_number,
    parts_of,
    refuse_unsharded,
    reshard,
    shard,
    whole,
)
from .voice import speak_as_one, speaks
from .world import ALONE, Lost, Pretended, World, launched_as

__all__ = [
    "ALONE",
    "Lending",
    "Lost",
    "Pretended",
    "Together",
    "World",
    "agreed",
    "by_first",
    "check_same",
    "digest",
    "empty_shard",
    "first_row",
    "is_restarted",
    "is_sharded",
    "joined",
    "largest_part",
    "launched_as",
    "leaving_word",
    "local",
    "over_parts",
    "part_like",
    "part_number",
    "parts_of",
    "pretended_shards",
    "refuse_unsharded",
    "reshard",
    "shard",
    "speak_as_one",
    "speaks",
    "together",
    "whole",
]
