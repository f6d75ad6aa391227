"""Prompts that ask for structured answers, with their schemas: extraction of one person (short
answers) and of several (lists, long ones), calls, choices."""

import json
from dataclasses import dataclass
from typing import Any

KINDS = ("extraction", "lists", "function calls", "choices")
TEXT = {"type": "string", "maxLength": 40}


@dataclass(frozen=True)
class StructuredPrompt:
    """A prompt and what its answer must be: JSON of a schema, or one of some choices."""

    kind: str
    prompt: str
    schema: dict[str, Any] | None = None
    choices: tuple[str, ...] = ()


def record(properties: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


PERSON = record(
    {
        "name": TEXT,
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "city": TEXT,
        "occupation": TEXT,
        "employment_status": {"enum": ["employed", "unemployed", "retired"]},
    }
)
PEOPLE = (
    "Maria Lopez, a 34-year-old nurse, lives in Valencia and works at the city hospital.",
    "Tom Becker is a carpenter from Hamburg. He is 58 years old and has his own workshop.",
    "At 71, Ingrid Olsen no longer teaches. The former teacher still lives in Bergen.",
    "Kenji Sato, 29, lost his job as a cook in Osaka last spring and is looking for a new one.",
    "The engineer Amina Diallo is 45 and lives in Dakar, where she works for the railway.",
    "Peter Novak of Brno was a pilot until last year. Now, at 66, he is retired.",
    "Lucy Brown is 23 years old. She lives in Leeds and works as a baker.",
    "Ravi Patel, a 52-year-old accountant, works for a bank in Mumbai.",
)
LISTED = 3  # people in a list
PERSONS = {"type": "array", "items": PERSON, "minItems": LISTED, "maxItems": LISTED}
MINUTES = {"type": "integer", "minimum": 0, "maximum": 9999}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {"location": TEXT, "unit": {"enum": ["celsius", "fahrenheit"]}},
    "send_message": {"recipient": TEXT, "message": TEXT},
    "set_reminder": {"title": TEXT, "minutes_from_now": MINUTES},
    "search_restaurants": {"location": TEXT, "cuisine": TEXT},
}
REQUESTS = (
    "What is the weather in Oslo in celsius?",
    "Tell Anna that I will be late.",
    "Remind me to call the dentist in 30 minutes.",
    "Find an Italian restaurant in Lisbon.",
    "How warm is it in Boston, in fahrenheit?",
    "Write to Paul that the meeting is at noon.",
    "Remind me in 45 minutes to take the bread out.",
    "Where can I eat Thai food in Geneva?",
)
TOPICS = (
    "a question about an invoice or a payment",
    "a technical problem with a device",
    "a request for a refund of a purchase",
    "a change of the delivery address",
)
MESSAGES = (
    "I was charged twice this month.",
    "The screen stays black when I press the button.",
    "The shoes do not fit, I want my money back.",
    "Please send the parcel to my new flat.",
    "Why is my bill higher than last year?",
    "My phone no longer connects to the network.",
    "I sent the lamp back. When do I get my money?",
    "I have moved. Where can I change where you deliver?",
)


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The schema of a call of a function."""
    return record({"name": {"const": name}, "arguments": record(arguments)})


def prompts_of(count: int) -> list[StructuredPrompt]:
    """`count` prompts of each kind, at most 8, those of one kind after the other."""
    calls = {"anyOf": [call(name, arguments) for name, arguments in FUNCTIONS.items()]}
    names = ", ".join(f"{name}({', '.join(given)})" for name, given in FUNCTIONS.items())
    keys = ", ".join(PERSON["properties"])
    topics = "; ".join(TOPICS)
    return [
        *(
            StructuredPrompt(
                KINDS[0], f"Give the person in the text as JSON with {keys}. Text: {text}", PERSON
            )
            for text in PEOPLE[:count]
        ),
        *(
            StructuredPrompt(
                KINDS[1],
                f"Give all {LISTED} people in the text as a JSON array of objects with {keys}. "
                f"Text: {' '.join(_people(first))}",
                PERSONS,
            )
            for first in range(count)
        ),
        *(
            StructuredPrompt(
                KINDS[2],
                f"Answer with one function call as JSON with name and arguments. The functions are "
                f"{names}. Request: {text}",
                calls,
            )
            for text in REQUESTS[:count]
        ),
        *(
            StructuredPrompt(
                KINDS[3],
                f"What is the message about? Answer with one of: {topics}. Message: {text}",
                choices=TOPICS,
            )
            for text in MESSAGES[:count]
        ),
    ]


def _people(first: int) -> list[str]:
    """The texts on some people, from this one on."""
    return [PEOPLE[(first + i) % len(PEOPLE)] for i in range(LISTED)]


def is_valid(asked: StructuredPrompt, answer: str) -> bool:
    """Whether an answer is one of the choices, or JSON of the schema."""
    import jsonschema  # of the extra `dev`

    if asked.choices:
        return answer in asked.choices
    assert asked.schema is not None
    try:
        jsonschema.validate(json.loads(answer), asked.schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
