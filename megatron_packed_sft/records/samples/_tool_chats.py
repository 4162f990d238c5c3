"""Chats with tools: the weather, a calendar and a calculator, called one by one, together, or not at all."""

from __future__ import annotations

import json
from random import Random
from typing import Any

from megatron_packed_sft.records.record import Conversation
from megatron_packed_sft.records.samples._exchange import NAMES, clock

_CITIES = ("Lisbon", "Ankara", "Oslo", "Nairobi", "Lima", "Hanoi", "Leipzig", "Quebec", "Cairo", "Perth")
_DAYS = ("today", "tomorrow", "Monday", "Wednesday", "Friday", "Sunday")
_SKIES = ("sunny", "cloudy", "rainy", "windy", "foggy")
_MEETINGS = ("the budget meeting", "lunch", "the piano lesson", "a call with the landlord", "the team review")


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string", "description": text} for key, text in properties.items()},
                "required": list(properties),
            },
        },
    }


WEATHER = _tool("get_weather", "The forecast for a city.", city="Name of the city", day="Which day, as it was asked")
EVENTS = _tool("list_events", "What is in the calendar on a day.", day="Which day, as it was asked")
BOOK = _tool("create_event", "Put an event into the calendar.", title="What it is", day="Which day", start="As HH:MM")
CALCULATE = _tool("calculate", "Work out an expression.", expression="Numbers and the signs + - *")


class _Dialogue:
    """Messages in order; tool calls get consecutive ids."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._num_calls = 0

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def assistant(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def call(self, *calls: tuple[str, dict[str, Any], Any]) -> None:
        """Add one message with all calls, and one with each result."""
        made, results = [], []
        for name, arguments, result in calls:
            self._num_calls += 1
            identity = f"call_{self._num_calls}"
            made.append({"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}})
            results.append({"role": "tool", "tool_call_id": identity, "name": name, "content": json.dumps(result)})
        self.messages += [{"role": "assistant", "content": "", "tool_calls": made}, *results]


def _on(day: str) -> str:
    return day if day in ("today", "tomorrow") else f"on {day}"


def _forecast(random: Random) -> dict[str, Any]:
    return {"sky": random.choice(_SKIES), "temperature": random.randint(-8, 36)}


def _advice(forecast: dict[str, Any]) -> str:
    if forecast["sky"] == "rainy":
        return "Take an umbrella."
    return "Dress warmly." if forecast["temperature"] < 10 else "You will not need a coat."


def _weather(random: Random, dialogue: _Dialogue) -> None:
    city, day, forecast = random.choice(_CITIES), random.choice(_DAYS), _forecast(random)
    if random.random() < 0.3:  # something is missing, so the assistant has to ask
        dialogue.user(f"What will the weather be like {_on(day)}?")
        dialogue.assistant("For which city shall I look?")
        dialogue.user(city)
    else:
        dialogue.user(
            random.choice((f"What is the weather in {city} {_on(day)}?", f"I am in {city} {_on(day)}. What do I wear?"))
        )
    dialogue.call(("get_weather", {"city": city, "day": day}, forecast))
    told = f"In {city} it will be {forecast['sky']} {_on(day)}, with {forecast['temperature']} degrees."
    dialogue.assistant(f"{told} {_advice(forecast)}")


def _two_cities(random: Random, dialogue: _Dialogue) -> None:
    (first, second), day = random.sample(_CITIES, 2), random.choice(_DAYS)
    one, two = _forecast(random), _forecast(random)
    dialogue.user(f"Where is it warmer {_on(day)}, in {first} or in {second}?")
    dialogue.call(("get_weather", {"city": first, "day": day}, one), ("get_weather", {"city": second, "day": day}, two))
    difference = one["temperature"] - two["temperature"]
    if difference == 0:
        dialogue.assistant(f"It is the same: {one['temperature']} degrees in both.")
        return
    warmer, colder = (first, second) if difference > 0 else (second, first)
    dialogue.assistant(f"{warmer} is warmer {_on(day)}, by {abs(difference)} degrees, than {colder}.")


def _booking(random: Random, dialogue: _Dialogue) -> None:
    day, title = random.choice(_DAYS), f"coffee with {random.choice(NAMES)}"
    hours = sorted(random.sample(range(8, 19), random.randint(0, 4)))
    events = [{"start": clock(hour * 60), "title": random.choice(_MEETINGS)} for hour in hours]
    wish = random.randint(8, 18)
    dialogue.user(f"Can you put {title} into my calendar {_on(day)} at {clock(wish * 60)}?")
    dialogue.call(("list_events", {"day": day}, {"events": events}))
    start = next(hour for hour in range(wish, 24) if hour not in hours)
    if start != wish:
        taken = events[hours.index(wish)]["title"]
        dialogue.assistant(f"At {clock(wish * 60)} there is {taken}. Would {clock(start * 60)} do as well?")
        dialogue.user("Yes, please.")
    arguments = {"title": title, "day": day, "start": clock(start * 60)}
    dialogue.call(("create_event", arguments, {"status": "created"}))
    dialogue.assistant(f"Done: {title} is in your calendar {_on(day)} at {clock(start * 60)}.")


def _agenda(random: Random, dialogue: _Dialogue) -> None:
    day = random.choice(_DAYS)
    hours = sorted(random.sample(range(8, 19), random.randint(0, 5)))
    events = [{"start": clock(hour * 60), "title": random.choice(_MEETINGS)} for hour in hours]
    dialogue.user(
        random.choice((f"What do I have {_on(day)}?", f"Am I busy {_on(day)}?", f"Read me my calendar for {day}."))
    )
    dialogue.call(("list_events", {"day": day}, {"events": events}))
    lines = "\n".join(f"- {event['start']}: {event['title']}" for event in events)
    dialogue.assistant(f"That is in your calendar {_on(day)}:\n{lines}" if events else f"You are free {_on(day)}.")


def _calculation(random: Random, dialogue: _Dialogue) -> None:
    first, second, third = random.randint(100, 9999), random.randint(2, 99), random.randint(1, 999)
    expression, result = f"{first} * {second} + {third}", first * second + third
    dialogue.user(f"How much is {first} times {second}, plus {third}?")
    dialogue.call(("calculate", {"expression": expression}, {"result": result}))
    dialogue.assistant(f"{expression} = {result}")


def _small_talk(random: Random, dialogue: _Dialogue) -> None:
    said, answer = random.choice(
        (
            ("Thank you, that was all.", "You are welcome. Have a good day!"),
            ("Who are you?", "I am an assistant. I can look up the weather, keep your calendar and calculate."),
            ("Can you order a pizza for me?", "No, I have no tool for that. I could put it into your calendar."),
        )
    )
    dialogue.user(said)
    dialogue.assistant(answer)


_SCENES = (_weather, _two_cities, _booking, _agenda, _calculation, _small_talk)


def tool_chat(random: Random) -> Conversation:
    """Return a chat of one to four scenes, with the tools it may use."""
    dialogue = _Dialogue()
    if random.random() < 0.5:
        text = "You help with the weather, the calendar and sums. Ask when something is missing."
        dialogue.messages.append({"role": "system", "content": text})
    for scene in random.sample(_SCENES, random.choice((1, 1, 1, 2, 2, 3, 4))):
        scene(random, dialogue)
    return Conversation(dialogue.messages, [WEATHER, EVENTS, BOOK, CALCULATE])
