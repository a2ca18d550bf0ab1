"""Synthetic recall tasks after RULER's, written anew: needles in a haystack, variable tracking, word counts.

RULER (https://github.com/NVIDIA/RULER) defines what is asked and how it is scored; the words here are our own. A
prompt's score is the share of its references that the answer contains, whatever the case.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pydoc_data.topics import topics

FILLER = (
    "A boat came in with the tide and left with it. Nobody asked where it had been. "
    "The bell on the pier rang twice, and then the rain began again. "
)
_ADJECTIVES = "brisk calm damp eager faint gentle hollow icy jolly keen lively mild narrow odd plain quiet"
_NOUNS = (
    "acorn bridge canal drum engine fiddle garden harbour inlet jacket kennel ladder meadow needle orchard paddle "
    "quarry river saddle tunnel valley window yard anvil basket copper domino ember falcon granite hinge island"
)
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()


@dataclass(frozen=True)
class Prompt:
    task: str
    text: str  # context and question
    answer_start: str  # put in the assistant's mouth
    references: tuple[str, ...]
    tokens: int  # that an answer may need

    def score(self, answer: str) -> float:
        """Share of references in the answer, 0 to 1."""
        found = answer.lower()
        return sum(reference.lower() in found for reference in self.references) / len(self.references)


def word(draw: random.Random) -> str:
    return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"


def number(draw: random.Random) -> str:
    return str(draw.randrange(10**6, 10**7))


def uuid(draw: random.Random) -> str:
    digits = f"{draw.getrandbits(128):032x}"
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def distinct(make: Callable[[random.Random], str], count: int, draw: random.Random) -> list[str]:
    """`count` different results of `make`, in the order of drawing."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(draw)] = None
    return list(found)


# ---------------------------------------------------------------- haystacks: sentences, without end


def repeated(draw: random.Random):
    while True:
        yield FILLER


def prose(draw: random.Random):
    pages = sorted(topics)
    while True:
        lines = topics[draw.choice(pages)].splitlines()
        yield from (line.strip() + "\n" for line in lines if line.strip())


def needles(key: Callable, value: Callable):
    def hay(draw: random.Random):
        while True:
            yield needle(key(draw), value(draw))

    return hay


def needle(key: str, value: str) -> str:
    return f"The secret code of {key} is {value}. "


def fill(hay, inserted: list[str], room: int, count: Callable[[str], int], draw: random.Random) -> str:
    """Sentences of `hay` until `room` tokens are used, with `inserted` at random places among them, in their order."""
    room -= sum(map(count, inserted))
    sentences: list[str] = []
    for sentence in hay(draw):
        room -= count(sentence)
        if room < 0:
            break
        sentences.append(sentence)
    places = sorted(draw.randrange(len(sentences) + 1) for _ in inserted)
    for place, text in reversed(list(zip(places, inserted))):
        sentences.insert(place, text)
    return "".join(sentences)


# ---------------------------------------------------------------- tasks


def niah(hay, key: Callable = word, value: Callable = number, keys: int = 1, values: int = 1, asked: int = 1):
    """`keys` needles with `values` codes each; `asked` of the keys are asked for."""

    def make(name: str, room: int, count: Callable[[str], int], draw: random.Random) -> Prompt:
        names = distinct(key, keys, draw)
        codes = {name: distinct(value, values, draw) for name in names}
        placed = [needle(name, code) for name in names for code in codes[name]]
        draw.shuffle(placed)
        wanted = names[:asked]
        many = values * asked > 1
        whose = ", ".join(wanted)
        start = "Some secret codes are hidden in the following text. Remember them; you will be asked for them.\n\n"
        end = f"\n\nWhat {'are all the secret codes' if many else 'is the secret code'} of {whose} in the text above?"
        references = tuple(code for name in wanted for code in codes[name])
        text = fill(hay, placed, room - count(start) - count(end), count, draw)
        tokens = 16 + (40 if value is uuid else 12) * len(references)
        return Prompt(name, start + text + end, f"The secret code{'s' * many} of {whose}:", references, tokens)

    return make


def tracking(chains: int = 1):
    """Chains of variables that take one another's value; which of them hold the first chain's?"""

    def make(name: str, room: int, count: Callable[[str], int], draw: random.Random) -> Prompt:
        hops = 4
        variables = distinct(lambda d: "".join(d.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ", k=5)), chains * (hops + 1), draw)
        values = distinct(number, chains, draw)
        order: list[int] = []
        placed: list[list[str]] = []
        for which, value in enumerate(values):
            chain = variables[which * (hops + 1) : (which + 1) * (hops + 1)]
            steps = [f"VAR {chain[0]} = {value}. "]
            steps += [f"VAR {later} = VAR {earlier}. " for earlier, later in itertools.pairwise(chain)]
            placed.append(steps)
            order += [which] * len(steps)
        draw.shuffle(order)
        turns = [iter(steps) for steps in placed]
        mixed = [next(turns[which]) for which in order]
        start = "Follow the assignments that are hidden in the following text.\n\n"
        end = f"\n\nWhich variables hold the value {values[0]}? Name all of them."
        text = fill(repeated, mixed, room - count(start) - count(end), count, draw)
        answer = f"The {hops + 1} variables that hold the value {values[0]} are:"
        return Prompt(name, start + text + end, answer, tuple(variables[: hops + 1]), 60)

    return make


def words(common: int, rarity: int):
    """`common` words fill half of a list; each of the others appears `rarity` times less often, at least once."""

    def make(name: str, room: int, count: Callable[[str], int], draw: random.Random) -> Prompt:
        start, end = "Read this list of words.\n\n", f"\n\nWhich {common} words appear most often in the list above?"
        room -= count(start) + count(end)
        vocabulary = distinct(word, len(ADJECTIVES) * len(NOUNS), draw)
        wanted, rest = vocabulary[:common], vocabulary[common:]
        times = room // (2 * count(" ".join(wanted)))
        others = max(1, times // rarity)
        listed = wanted * times
        room -= count(" ".join(listed))
        for other in rest:
            room -= others * count(" " + other)
            if room < 0:
                break
            listed += [other] * others
        draw.shuffle(listed)
        answer = f"The {common} words that appear most often are:"
        return Prompt(name, start + " ".join(listed) + end, answer, tuple(wanted), 8 * common + 16)

    return make


TASKS: dict[str, Callable[..., Prompt]] = {
    "niah_single_1": niah(repeated),
    "niah_single_2": niah(prose),
    "niah_single_3": niah(prose, value=uuid),
    "niah_multikey_1": niah(prose, keys=4),
    "niah_multikey_2": niah(needles(word, number)),
    "niah_multikey_3": niah(needles(uuid, uuid), key=uuid, value=uuid),
    "niah_multivalue": niah(prose, values=4),
    "niah_multiquery": niah(prose, keys=4, asked=4),
    "vt": tracking(),
    "cwe": words(10, 10),
    "fwe": words(3, 4),
}


def prompts(task: str, length: int, number_of: int, count: Callable[[str], int], seed: int = 0) -> list[Prompt]:
    """`number_of` prompts of a task, each at most `length` tokens by `count`. The same seed gives the same prompts."""
    draw = random.Random(f"{task} {length} {seed}")
    return [TASKS[task](task, length, count, draw) for _ in range(number_of)]
