"""The marks around the thinking part of a reasoning model's answer."""

# The tokens that begin and end the thinking part, in the vocabularies of published models.
MARKS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
)
