"""Explanations of a few subjects: short, long, or as a comparison."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from megatron_packed_sft.records.samples._exchange import Exchange, asked


class _Subject(NamedTuple):
    what: str  # continues after "is"
    facts: tuple[str, ...]
    example: str


_SUBJECTS = {
    "a thermometer": _Subject(
        "an instrument that shows how warm something is",
        (
            "The older kind holds a liquid that takes up more room when it gets warmer and so climbs in a thin tube.",
            "The electronic kind measures how a small piece of metal oxide resists the current.",
            "Water freezes at 0 and boils at 100 degrees on the scale named after Celsius.",
            "It needs a moment to take on the temperature of what it touches.",
        ),
        "A cook who puts one into a roast sees when the middle is done without cutting it open",
    ),
    "a tide": _Subject(
        "the slow rise and fall of the sea at a coast",
        (
            "The moon pulls on the water of the oceans, and the sun does so too, but less.",
            "On most coasts there are two high and two low waters in a little more than a day.",
            "When sun and moon pull along one line, at new and at full moon, the range is greatest.",
            "Narrow bays can make the range many times larger than on an open coast.",
        ),
        "A fisherman looks up the time of high water before he leaves a shallow harbour",
    ),
    "a compass": _Subject(
        "a tool with a magnetic needle that turns towards the north",
        (
            "The needle lines up with the magnetic field of the earth.",
            "The magnetic north is not exactly where the axis of the earth comes out, so maps tell the difference.",
            "Iron nearby leads the needle astray.",
            "It needs neither a battery nor a view of the sky.",
        ),
        "A hiker in fog lays it on the map, turns the map until both norths agree, and reads off the way",
    ),
    "photosynthesis": _Subject(
        "the way in which green plants make sugar with the help of light",
        (
            "Leaves take in carbon dioxide from the air through small openings.",
            "Roots bring up water, and the green pigment catches the light that drives the change.",
            "Oxygen is left over and goes into the air.",
            "At night it stops, while the plant goes on breathing like other living things.",
        ),
        "A water plant in a sunny glass gives off small bubbles, and hardly any in the shade",
    ),
    "a library catalogue": _Subject(
        "a list that tells which books a library has and where they stand",
        (
            "Every book has a mark that gives its place on the shelves.",
            "One can look for the author, the title or the subject.",
            "Catalogues used to be drawers full of cards and are now databases.",
            "A good one also says whether a book is lent out and when it is due.",
        ),
        "A student who knows only the subject finds the shelf first and then browses the neighbours",
    ),
    "compound interest": _Subject(
        "interest that is paid on earlier interest as well as on the money first put in",
        (
            "After each period the interest is added to the sum, and the next period counts from there.",
            "At first it hardly differs from simple interest, later it grows faster and faster.",
            "As a rule of thumb, 72 divided by the rate in per cent gives the years until the sum has doubled.",
            "The same rule works against those who owe money.",
        ),
        "A sum at 6 per cent a year doubles in about twelve years",
    ),
    "a lever": _Subject(
        "a stiff bar that turns about a fixed point and makes a small force do heavy work",
        (
            "A force counts more the further it acts from the point about which the bar turns.",
            "What is won in force is lost in distance: the long end moves much further than the short one.",
            "Scissors, oars, wheelbarrows and bottle openers are all made of levers.",
            "Twice the length on one side means half the force there.",
        ),
        "A child who sits far out on a seesaw can lift a grown-up who sits close to the middle",
    ),
    "a rainbow": _Subject(
        "an arc of colours that appears when sunlight meets falling drops",
        (
            "Each drop bends the light as it enters, throws it back inside, and bends it again on the way out.",
            "Colours are bent by different amounts, red least and violet most.",
            "One sees it only with the sun in the back, and low enough.",
            "Everybody sees a bow of their own, since the angle to the eye is what counts.",
        ),
        "A garden hose with a fine spray makes a small one on a sunny afternoon",
    ),
    "a vaccine": _Subject(
        "a preparation that teaches the body to recognise a germ before it meets the real one",
        (
            "It holds a harmless part or a weakened form of the germ, or the plan for such a part.",
            "The body answers with cells and antibodies, and some of these cells remember for years.",
            "When the germ comes, the answer is quicker and stronger.",
            "Some need to be repeated, because memory fades or the germ changes.",
        ),
        "A shot against tetanus is refreshed about every ten years",
    ),
    "an echo": _Subject(
        "a sound that comes back from something it has met",
        (
            "Sound travels about 340 metres in a second through air.",
            "Hard, even walls throw back more of it than curtains or leaves.",
            "The ear hears the return as a sound of its own only after about a tenth of a second.",
            "Bats and ships use it to find out how far away things are.",
        ),
        "Someone who claps and hears the return after one second stands about 170 metres from the cliff",
    ),
}
_OPENINGS = ("In short", "Put simply", "In a few words", "To begin with")
_LINKS = ("", "", "", "It also helps to know this. ", "Another point matters here. ", "There is more to it. ")


def explanation(random: Random) -> Exchange:
    """Return an explanation of one subject, in one or several sentences."""
    name = random.choice(tuple(_SUBJECTS))
    subject = _SUBJECTS[name]
    num_facts = random.randint(0, len(subject.facts))
    question = random.choice(("What is {}?", "Can you explain what {} is?", "I keep hearing about it. What is {}?"))
    sentences = [f"{name[0].upper()}{name[1:]} is {subject.what}."]
    if num_facts:
        sentences[0] = f"{random.choice(_OPENINGS)}, {name} is {subject.what}."
        sentences += [random.choice(_LINKS) + fact for fact in random.sample(subject.facts, num_facts)]
        sentences.append(f"An example: {subject.example[0].lower()}{subject.example[1:]}.")
    reasoning = f"The question is about {name}. One sentence on what it is, then {num_facts} further points."
    return Exchange(asked(random, question.format(name)), " ".join(sentences), reasoning)


def comparison(random: Random) -> Exchange:
    """Return a comparison of two subjects."""
    first, second = random.sample(tuple(_SUBJECTS), 2)
    parts = []
    for name in (first, second):
        subject = _SUBJECTS[name]
        facts = " ".join(random.sample(subject.facts, 3))
        parts.append(f"{name[0].upper()}{name[1:]} is {subject.what}. {facts} {subject.example}.")
    question = f"What is the difference between {first} and {second}?"
    answer = f"They are not of the same kind. {parts[0]}\n\n{parts[1]}"
    return Exchange(asked(random, question), answer, f"Say what {first} is, then what {second} is.")


def lecture(random: Random) -> Exchange:
    """Return a talk on several subjects, each under a heading: the longest answers besides plans."""
    chosen = random.sample(tuple(_SUBJECTS), random.randint(3, len(_SUBJECTS)))
    audience = random.choice(("a school class", "my grandparents", "an evening course", "the museum's visitors"))
    sections = []
    for number, name in enumerate(chosen, 1):
        subject = _SUBJECTS[name]
        facts = " ".join(random.choice(_LINKS) + fact for fact in random.sample(subject.facts, len(subject.facts)))
        heading = f"{number}. {name[0].upper()}{name[1:]}"
        sections.append(f"{heading}\n{random.choice(_OPENINGS)}, this is {subject.what}. {facts} {subject.example}.")
    question = f"I have to give a talk for {audience}. Please write it, with these parts: {'; '.join(chosen)}."
    answer = "\n\n".join(sections) + f"\n\nThat makes {len(chosen)} parts. Leave time for questions after each."
    return Exchange(question, answer, f"There are {len(chosen)} parts. Keep their order and give each a heading.")


EXPLAINING = (explanation, explanation, comparison)
