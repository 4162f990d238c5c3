"""Short arithmetic: shopping, sharing, travelling, gardens, discounts, units, sequences and words."""

from __future__ import annotations

from random import Random

from megatron_packed_sft.records.samples._exchange import NAMES, Exchange, asked, counted, joined, money

_GOODS = ("apple", "notebook", "candle", "postcard", "lemon", "bread roll", "pencil", "ticket", "light bulb", "mug")
_UNITS = (
    ("kilometre", "metre", 1000), ("metre", "centimetre", 100), ("kilogram", "gram", 1000),
    ("litre", "millilitre", 1000), ("hour", "minute", 60), ("minute", "second", 60), ("day", "hour", 24),
    ("week", "day", 7), ("year", "month", 12), ("tonne", "kilogram", 1000),
)  # fmt: skip
_WORDS = (
    "river", "garden", "window", "copper", "lantern", "violin", "pepper", "meadow", "anchor", "basket", "cloud",
    "desert", "engine", "feather", "glacier", "harbour", "island", "jacket", "kettle", "ladder", "marble", "needle",
    "orchard", "pebble", "quarry", "ribbon", "saddle", "timber", "umbrella", "valley", "walnut", "yarn",
)  # fmt: skip


def shopping(random: Random) -> Exchange:
    """Return a question about the change from a purchase."""
    name, goods = random.choice(NAMES), random.choice(_GOODS)
    number, price = random.randint(2, 12), random.randrange(20, 400, 5)
    total = number * price
    note = next(value for value in (500, 1000, 2000, 5000) if value >= total)
    question = (
        f"{name} buys {counted(number, goods)} at {money(price)} each and pays with a {note // 100} euro note. "
        "How much change is that?"
    )
    answer = (
        f"The {goods}s cost {number} x {money(price)} = {money(total)}. "
        f"From {note // 100} euros, {money(note - total)} are left, so the change is {money(note - total)}."
    )
    reasoning = f"Multiply first: {number} * {price} = {total} cents. Then subtract: {note} - {total} = {note - total}."
    return Exchange(asked(random, question), answer, reasoning)


def sharing(random: Random) -> Exchange:
    """Return a division with a remainder."""
    number, people = random.randint(10, 150), random.randint(2, 12)
    goods = random.choice(_GOODS)
    each, left = divmod(number, people)
    question = f"If {counted(number, goods)} are shared equally among {people} people, how many does each one get?"
    rest = "Nothing is left over." if left == 0 else f"{left} {'is' if left == 1 else 'are'} left over."
    answer = f"Each person gets {counted(each, goods)}, because {people} x {each} = {people * each}. {rest}"
    reasoning = f"{number} divided by {people}: {people} * {each} = {people * each}, remainder {left}."
    return Exchange(asked(random, question), answer, reasoning)


def travelling(random: Random) -> Exchange:
    """Return a question about speed, time and distance."""
    means, low, high = random.choice((("cyclist", 12, 28), ("train", 80, 220), ("walker", 3, 6), ("bus", 40, 90)))
    speed, hours = random.randint(low, high), random.randint(2, 9)
    if random.random() < 0.5:
        question = f"A {means} goes {speed} kilometres per hour for {hours} hours. How far is that?"
        answer = f"Distance is speed times time: {speed} x {hours} = {speed * hours} kilometres."
        reasoning = f"Distance = speed * time = {speed} * {hours} = {speed * hours}."
    else:
        question = f"How long does a {means} need for {speed * hours} kilometres at {speed} kilometres per hour?"
        answer = f"Time is distance divided by speed: {speed * hours} / {speed} = {hours} hours."
        reasoning = f"Time = distance / speed = {speed * hours} / {speed} = {hours}."
    return Exchange(asked(random, question), answer, reasoning)


def measuring(random: Random) -> Exchange:
    """Return a question about the area and perimeter of a rectangle."""
    place = random.choice(("garden", "room", "playground", "field", "terrace", "parking lot"))
    length, width = random.randint(3, 60), random.randint(2, 40)
    question = f"A {place} is {length} metres long and {width} metres wide. What are its area and its perimeter?"
    answer = (
        f"Area: {length} x {width} = {length * width} square metres. "
        f"Perimeter: 2 x ({length} + {width}) = 2 x {length + width} = {2 * (length + width)} metres."
    )
    reasoning = f"Area multiplies the sides, {length * width}. The perimeter adds all four, {2 * (length + width)}."
    return Exchange(asked(random, question), answer, reasoning)


def discounting(random: Random) -> Exchange:
    """Return a question about a discount in per cent."""
    thing = random.choice(("jacket", "bicycle", "lamp", "table", "radio", "backpack", "keyboard"))
    price, percent = random.randrange(20, 400, 10), random.choice((10, 20, 25, 30, 50))
    off = price * percent
    question = f"A {thing} costs {price} euros. What does it cost with {percent} per cent off?"
    answer = f"{percent} per cent of {price} euros is {money(off)}. The {thing} then costs {money(price * 100 - off)}."
    reasoning = f"{price} * {percent} / 100 = {off / 100:.2f}; {price} - {off / 100:.2f} = {price - off / 100:.2f}."
    return Exchange(asked(random, question), answer, reasoning)


def converting(random: Random) -> Exchange:
    """Return a conversion into a smaller unit of measure."""
    large, small, factor = random.choice(_UNITS)
    number = random.randint(2, 40)
    question = f"How many {small}s are {counted(number, large)}?"
    answer = f"One {large} is {factor} {small}s, so {counted(number, large)} are {number * factor} {small}s."
    return Exchange(asked(random, question), answer, f"{number} * {factor} = {number * factor}.")


def continuing(random: Random) -> Exchange:
    """Return a question about the next numbers of a series."""
    start, step = random.randint(1, 60), random.randint(2, 15)
    shown = [start + step * index for index in range(5)]
    more = [shown[-1] + step * index for index in (1, 2, 3)]
    question = f"How does this go on: {', '.join(map(str, shown))}?"
    answer = f"Each number is {step} more than the one before, so it goes on with {joined([str(one) for one in more])}."
    return Exchange(asked(random, question), answer, f"{shown[1]} - {shown[0]} = {step}, and so for all of them.")


def ordering(random: Random) -> Exchange:
    """Return a request to sort, reverse or capitalize words."""
    words = random.sample(_WORDS, random.randint(3, 9))
    how, result = random.choice(
        (
            ("in alphabetical order", sorted(words)),
            ("in reverse order", words[::-1]),
            ("from the shortest to the longest, equal ones in alphabetical order", sorted(sorted(words), key=len)),
            ("in capital letters", [word.upper() for word in words]),
        )
    )
    question = f"Write these words {how}: {', '.join(words)}."
    return Exchange(question, ", ".join(result), f"There are {len(words)} words; the first is now {result[0]}.")


ARITHMETIC = (shopping, sharing, travelling, measuring, discounting, converting, continuing, ordering)
