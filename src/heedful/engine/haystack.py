"""Plain English without end, made from a small grammar: the hay of the needle tests, and text for long streams.

Sentences are about a few recurring people, things and places. The same seed gives the same sentences everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_PEOPLE = (
    "the baker", "the old teacher", "a young sailor", "the postman", "her sister", "the gardener", "my uncle",
    "the doctor", "a tired farmer", "the librarian", "the carpenter", "his neighbour", "the miller", "a quiet student",
    "the fisherman", "the clockmaker", "the shepherd", "our landlady", "the painter", "a travelling musician",
)  # fmt: skip
_DEEDS = (
    "carried {thing} to {place}", "left {thing} at {place}", "was looking for {thing} near {place}",
    "bought {thing} from {other}", "talked with {other} about {thing}", "walked slowly towards {place}",
    "showed {thing} to {other}", "waited for {other} at {place}", "repaired {thing} for {other}",
    "forgot {thing} on the way to {place}", "sat down beside {other}", "promised {thing} to {other}",
    "wrote a letter to {other} about {place}", "cleaned {thing} and went back to {place}", "hid {thing} behind {place}",
)  # fmt: skip
_THINGS = (
    "a basket of apples", "the blue lantern", "a loaf of bread", "an old map", "the wooden ladder", "a jar of honey",
    "the heavy coat", "a bundle of letters", "two silver spoons", "the broken clock", "a bag of flour", "the red kite",
    "a pair of boots", "the garden tools", "a pot of soup", "an empty bottle", "the long rope", "a book of songs",
)  # fmt: skip
_PLACES = (
    "the market", "the harbour", "the mill by the river", "the little church", "the school", "the stone bridge",
    "the railway station", "the inn at the crossroads", "the orchard", "the town hall", "the edge of the forest",
    "the lighthouse", "the square", "the bakery", "the north gate",
)  # fmt: skip
_TIMES = (
    "In the morning", "Before noon", "After the rain", "On Sunday", "Late in the evening", "That winter",
    "Every Friday", "When the bells rang", "A week later", "As the sun went down", "In early spring", "The next day",
)  # fmt: skip
_REASONS = (
    "because the weather was fine", "although it was getting dark", "and nobody asked why", "as always before",
    "since there was nothing else to do", "but said nothing about it", "while the children were playing outside",
    "and was home again before supper", "because somebody had asked for it", "and laughed",
)  # fmt: skip


def sentences(seed: int) -> Iterator[str]:
    """Endless. The generator is Python's own, whose choices are the same in every version of it."""
    source = random.Random(seed)

    def one_of(words: tuple[str, ...]) -> str:
        return words[int(source.random() * len(words))]

    while True:
        person, other = one_of(_PEOPLE), one_of(_PEOPLE)
        deed = one_of(_DEEDS).format(thing=one_of(_THINGS), place=one_of(_PLACES), other=other)
        form = source.random()
        if form < 0.4:
            sentence = f"{one_of(_TIMES)} {person} {deed}."
        elif form < 0.7:
            sentence = f"{person[0].upper()}{person[1:]} {deed} {one_of(_REASONS)}."
        else:
            sentence = f"{one_of(_TIMES)} {person} {deed}, {one_of(_REASONS)}."
        yield sentence
