"""A small artificial language and its translation: unlimited sentence pairs from a seed, without a download.

The source is verb-final and inflected: adjectives follow their noun and agree with it in gender, number and
case, the article comes last, relative clauses and places come before what they describe, and the verb agrees
with its subject. The target is plain English. So a translator has to reorder over long distances, to carry
number from the subject to the verb across what stands between, and to choose "a" or "an" by the next word.

    >>> next(sentence_pairs(1, seed=10))
    ('pope tibofear ga ripoenl petapearenl faponuna', 'the young umbrella carries happy cats')
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

# The English forms. Nouns: singular, plural. Verbs: singular, plural, past.
NOUNS = """dog dogs, cat cats, man men, woman women, child children, bird birds, horse horses,
teacher teachers, king kings, doctor doctors, farmer farmers, sister sisters, apple apples, egg eggs,
house houses, river rivers, tree trees, book books, stone stones, umbrella umbrellas, ship ships,
letter letters, garden gardens, orange oranges"""
TRANSITIVE = """sees see saw, finds find found, likes like liked, carries carry carried, paints paint painted,
follows follow followed, hides hide hid, sells sell sold, forgets forget forgot, wants want wanted,
holds hold held, buys buy bought"""
INTRANSITIVE = """sleeps sleep slept, waits wait waited, falls fall fell, sings sing sang, rests rest rested,
laughs laugh laughed"""
ADJECTIVES = "old young red small happy angry empty quiet huge wise ugly green"
ADVERBS = "often never slowly always gladly again"
PLACES = "near behind under above inside"
_COUNTS = ("two", "three", "many")


@dataclass(frozen=True)
class Phrase:
    """A noun and its modifiers: adjectives, a number, a place and a preposition, a relative clause."""

    noun: int
    many: bool
    definite: bool
    count: int | None
    adjectives: tuple[int, ...]
    place: "tuple[int, Phrase] | None"
    clause: "Clause | None"


@dataclass(frozen=True)
class Clause:
    """A verb with its subject (None in a relative clause), its object if it takes one, and an adverb."""

    subject: Phrase | None
    verb: int
    object: Phrase | None
    past: bool
    adverb: int | None


def sentence_pairs(count: int, seed: int = 0) -> Iterator[tuple[str, str]]:
    """A count and a seed -> that many different pairs (source, target)."""
    draw = _Draw(seed)
    seen: set[str] = set()
    while len(seen) < count:
        clauses = [_clause(draw) for _ in range(1 + draw.chance(0.2))]
        source = " da ".join(_source_clause(clause) for clause in clauses)
        if source not in seen:
            seen.add(source)
            yield source, " and ".join(_english_clause(clause) for clause in clauses)


class _Draw:
    """Draws from `random()`, the one method whose numbers are the same in every version of Python."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def below(self, count: int) -> int:
        return int(self.random() * count)


def _clause(draw: _Draw) -> Clause:
    transitive = draw.chance(0.7)
    return Clause(
        subject=_phrase(draw, depth=0),
        verb=draw.below(len(_words(TRANSITIVE if transitive else INTRANSITIVE))),
        object=_phrase(draw, depth=0) if transitive else None,
        past=draw.chance(0.4),
        adverb=draw.below(len(ADVERBS.split())) if draw.chance(0.25) else None,
    )


def _phrase(draw: _Draw, depth: int) -> Phrase:
    many, definite = draw.chance(0.4), draw.chance(0.5)
    more = 0.25 if depth < 2 else 0
    place = (draw.below(len(PLACES.split())), _phrase(draw, depth + 1)) if draw.chance(more) else None
    return Phrase(
        noun=draw.below(len(_words(NOUNS))),
        many=many,
        definite=definite,
        count=draw.below(len(_COUNTS)) if many and draw.chance(0.4) else None,
        adjectives=tuple({draw.below(len(ADJECTIVES.split())): None for _ in range(draw.below(3))}),
        place=place,
        clause=_relative_clause(draw, depth + 1) if draw.chance(more) and not place else None,
    )


def _relative_clause(draw: _Draw, depth: int) -> Clause:
    verb = draw.below(len(_words(TRANSITIVE)))
    return Clause(None, verb, _phrase(draw, depth), past=draw.chance(0.4), adverb=None)


# English


def _english_clause(clause: Clause, many: bool = False) -> str:
    words = []
    if clause.subject is not None:
        words.append(_english_phrase(clause.subject))
        many = clause.subject.many
    if clause.adverb is not None:
        words.append(ADVERBS.split()[clause.adverb])
    forms = _words(INTRANSITIVE if clause.object is None else TRANSITIVE)[clause.verb]
    words.append(forms[2 if clause.past else int(many)])
    if clause.object is not None:
        words.append(_english_phrase(clause.object))
    return " ".join(words)


def _english_phrase(phrase: Phrase) -> str:
    words = [ADJECTIVES.split()[adjective] for adjective in phrase.adjectives]
    words.append(_words(NOUNS)[phrase.noun][int(phrase.many)])
    if phrase.count is not None:
        words.insert(0, _COUNTS[phrase.count])
    if phrase.definite:
        words.insert(0, "the")
    elif not phrase.many:
        words.insert(0, "an" if words[0][0] in "aeiou" else "a")
    if phrase.place is not None:
        words += [PLACES.split()[phrase.place[0]], _english_phrase(phrase.place[1])]
    if phrase.clause is not None:
        words += ["that", _english_clause(phrase.clause, phrase.many)]
    return " ".join(words)


# The source language


def _source_clause(clause: Clause, many: bool = False, gender: int = 0) -> str:
    words = []
    if clause.subject is not None:
        words.append(_source_phrase(clause.subject, case=0))
        many, gender = clause.subject.many, clause.subject.noun % 3
    if clause.object is not None:
        words.append(_source_phrase(clause.object, case=1))
    if clause.adverb is not None:
        words.append(_stem("adverb", clause.adverb))
    kind = "doing" if clause.object is None else "action"
    relative = "ke" if clause.subject is None else ""
    ending = ("o", "a", "u")[gender] if not many else "im"
    words.append(_stem(kind, clause.verb) + ("t" if clause.past else "n") + ending + relative)
    return " ".join(words)


def _source_phrase(phrase: Phrase, case: int) -> str:
    gender = phrase.noun % 3
    words = []
    if phrase.clause is not None:
        words.append(_source_clause(phrase.clause, phrase.many, gender))
    if phrase.place is not None:
        words += [_source_phrase(phrase.place[1], case=2), _stem("place", phrase.place[0])]
    words.append(_stem("noun", phrase.noun) + ("", "en", "is")[case] + ("l" if phrase.many else ""))
    ending = ("or", "ar", "ur")[gender] + ("", "en", "is")[case] + ("l" if phrase.many else "")
    words += [_stem("adjective", adjective) + ending for adjective in reversed(phrase.adjectives)]
    if phrase.count is not None:
        words.append(_stem("count", phrase.count))
    if phrase.definite:
        words.append(("go", "ga", "gu")[gender] + ("l" if phrase.many else ""))
    return " ".join(words)


@cache
def _stem(kind: str, number: int) -> str:
    """The same two or three syllables for the same word, whatever the seed of the sentences."""
    draw = _Draw(int.from_bytes(f"{kind} {number}".encode(), "big"))
    syllables = ("pkbdgmnfvslrzt"[draw.below(14)] + "aeiou"[draw.below(5)] for _ in range(2 + draw.chance(0.4)))
    return "".join(syllables)


@cache
def _words(text: str) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(word.split()) for word in text.split(","))
