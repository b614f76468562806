"""The ids of a vocabulary that stand for no piece of text; the pieces' ids begin after them."""

BOS, PAD, EOS, UNKNOWN = range(4)
SPECIAL_IDS = 4
