"""Plans whose numbers add up: days, recipes, and long ones over many days."""

from __future__ import annotations

from random import Random

from megatron_packed_sft.records.samples._exchange import NAMES, Exchange, asked, clock, counted, joined

_TASKS = (
    "answer the letters", "water the plants", "call the plumber", "clean the kitchen", "read the report", "bake a cake",
    "repair the bicycle", "practise the piano", "write the invitation", "sort the photographs", "walk the dog",
)  # fmt: skip
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
# Per dish: amounts for one person (name, amount, unit), and what to do with them.
_DISHES: dict[str, tuple[tuple[tuple[str, int, str], ...], tuple[str, ...]]] = {
    "lentil soup": (
        (("lentils", 80, "g"), ("carrots", 60, "g"), ("stock", 300, "ml"), ("onion", 40, "g")),
        (
            "Chop the onion and the carrots and let them soften in a little oil.",
            "Add the rinsed lentils and stir for a minute.",
            "Pour in the stock and simmer until the lentils are soft, about 25 minutes.",
            "Season with salt, pepper and a few drops of vinegar.",
        ),
    ),
    "pancakes": (
        (("flour", 60, "g"), ("milk", 125, "ml"), ("butter", 10, "g"), ("eggs", 1, "")),
        (
            "Whisk the eggs with the milk, then beat in the flour until no lumps are left.",
            "Let the batter rest for fifteen minutes while you melt the butter.",
            "Fry thin layers in a hot pan, about one minute on each side.",
            "Keep them warm under a cloth until all are done.",
        ),
    ),
    "tomato pasta": (
        (("pasta", 110, "g"), ("tomatoes", 150, "g"), ("olive oil", 10, "ml"), ("cheese", 20, "g")),
        (
            "Bring a large pot of salted water to the boil and cook the pasta until firm to the bite.",
            "Meanwhile warm the oil, add the chopped tomatoes and let them thicken.",
            "Drain the pasta, keep a cup of the water, and toss everything in the pan.",
            "Grate the cheese over it and serve at once.",
        ),
    ),
    "rice salad": (
        (("rice", 70, "g"), ("cucumber", 80, "g"), ("peas", 50, "g"), ("lemon juice", 15, "ml")),
        (
            "Cook the rice, rinse it with cold water and let it drain well.",
            "Cut the cucumber into small cubes and warm the peas for two minutes.",
            "Mix everything with the lemon juice and a pinch of salt.",
            "Let it stand for half an hour before you serve it.",
        ),
    ),
}
_SESSIONS = (
    ("an easy run", 4, "Keep a pace at which you could still talk in whole sentences, and stop before you are tired."),
    ("a steady run", 6, "Start slowly, find a rhythm after ten minutes, and hold it to the end without pushing."),
    ("hill repeats", 5, "Run up with short steps, walk down, and count the repeats so that you can compare next time."),
    ("a long run", 9, "Take water along, choose a flat way, and slow down early; the distance is what matters today."),
    ("a walk", 3, "This is rest in motion: look around, breathe through the nose, and let the legs recover."),
)
_STUDY = ("vocabulary", "grammar", "reading", "listening", "speaking", "writing")
_STUDY_HOW = (
    "Work with cards: look at one side, say the other aloud, and put aside what you knew twice in a row.",
    "Take one rule, write three sentences of your own with it, and one in which it does not apply.",
    "Choose a short text, read it once for the sense, and then again with a pencil for whatever is new.",
    "Play two minutes of speech, note the words you caught, and play it again until the note makes a story.",
    "Tell an imaginary friend what you did today, without stopping to look anything up, and repeat it better.",
    "Write a message of eighty words, leave it for an hour, and then correct it as if somebody else had sent it.",
)


def day_plan(random: Random) -> Exchange:
    """Return a list of tasks with their times."""
    start = random.randrange(7 * 60, 14 * 60, 15)
    tasks = [(task, random.randrange(10, 90, 5)) for task in random.sample(_TASKS, random.randint(2, 7))]
    told = joined([f"{task} ({length} minutes)" for task, length in tasks])
    lines, now = [], start
    for task, length in tasks:
        lines.append(f"{clock(now)} to {clock(now + length)}: {task}")
        now += length
    question = f"I start at {clock(start)} and want to {told}, in this order and without breaks. When is each task due?"
    answer = "Here is your plan:\n" + "\n".join(lines) + f"\nYou are done at {clock(now)}."
    total = sum(length for _, length in tasks)
    reasoning = f"The tasks take {total} minutes together, so the end is {clock(start)} plus {total} minutes."
    return Exchange(asked(random, question), answer, reasoning)


def leaving(random: Random) -> Exchange:
    """Return a question about when to leave to be on time."""
    arrival, way, spare = random.randrange(8 * 60, 20 * 60, 5), random.randrange(10, 100, 5), random.choice((5, 10, 15))
    goal = random.choice(("the station", "the theatre", "the dentist", "a concert", "the airport bus", "school"))
    question = (
        f"I have to be at {goal} at {clock(arrival)}. The way takes {way} minutes and I want {spare} minutes to spare. "
        "When should I leave?"
    )
    answer = (
        f"Leave at {clock(arrival - way - spare)}. {way} minutes on the way and {spare} to spare make "
        f"{way + spare} minutes before {clock(arrival)}."
    )
    return Exchange(asked(random, question), answer, f"{clock(arrival)} minus {way + spare} minutes.")


def recipe(random: Random) -> Exchange:
    """Return a recipe for some number of people."""
    dish = random.choice(tuple(_DISHES))
    ingredients, steps = _DISHES[dish]
    people = random.randint(2, 9)
    lines = [f"- {amount * people} {unit + ' ' if unit else ''}{name}" for name, amount, unit in ingredients]
    question = random.choice(
        (
            f"How do I cook {dish} for {people} people?",
            f"What do I need for {dish} if {people} of us are eating, and what are the steps?",
            f"{random.choice(NAMES)} wants to make {dish} for {people} guests. Can you write down the recipe?",
        )
    )
    numbered = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    answer = f"For {people} people you need:\n" + "\n".join(lines) + f"\n\nThen:\n{numbered}"
    name, amount, unit = ingredients[0]
    reasoning = (
        f"One portion takes {amount}{unit} of {name}, so {people} take {amount * people}{unit}; likewise the rest."
    )
    return Exchange(asked(random, question), answer, reasoning)


def training_plan(random: Random) -> Exchange:
    """Return a running plan over several weeks; distances grow and are added up."""
    weeks, extra = random.randint(1, 4), random.randint(1, 3)
    name = random.choice(NAMES)
    parts, total = [], 0
    for week in range(weeks):
        lines, week_total = [], 0
        for day, (what, distance, how) in zip(_DAYS, random.choices(_SESSIONS, k=7), strict=True):
            kilometres = distance + week * extra
            week_total += kilometres
            lines.append(f"{day}: {what} of {counted(kilometres, 'kilometre')}. {how}")
        total += week_total
        parts.append(f"Week {week + 1}\n" + "\n".join(lines) + f"\nTogether: {week_total} kilometres.")
    question = (
        f"Please write {name} a running plan for {counted(weeks, 'week')}, with something for every day. Each week, "
        f"every session should be {counted(extra, 'kilometre')} longer."
    )
    answer = "\n\n".join(parts) + f"\n\nOver {counted(weeks, 'week')} that makes {total} kilometres."
    return Exchange(question, answer, f"There are {7 * weeks} sessions; each gets {extra} longer from week to week.")


def study_plan(random: Random) -> Exchange:
    """Return a study plan over many days; minutes are added up."""
    days, language = random.randint(3, 16), random.choice(("Spanish", "Turkish", "Korean", "Danish", "Swahili"))
    parts, total = [], 0
    for day in range(1, days + 1):
        chosen = sorted(random.sample(range(len(_STUDY)), random.randint(1, 3)))
        minutes = [random.randrange(10, 45, 5) for _ in chosen]
        total += sum(minutes)
        lines = [
            f"{_STUDY[one]}, {length} minutes. {_STUDY_HOW[one]}" for one, length in zip(chosen, minutes, strict=True)
        ]
        parts.append(f"Day {day} ({sum(minutes)} minutes)\n" + "\n".join(lines))
    question = f"I want to learn {language} and have {counted(days, 'day')} of holiday. Can you make me a study plan?"
    answer = "\n\n".join(parts) + f"\n\nAltogether you will study for {total} minutes."
    return Exchange(asked(random, question), answer, f"{days} days, with one to three kinds of practice on each.")


PLANNING = (day_plan, leaving, recipe)
LONG_PLANS = (training_plan, study_plan)
