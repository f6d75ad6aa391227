"""Errors about what a request holds."""

import json
from typing import Any

from decode.base.errors import UserError
from draftsmith.net.api_error import ApiError, cut

LONGEST_SHOWN = 60  # characters of a value or a name of the client


def refused(error: UserError, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that the decode refuses."""
    return ApiError(400, str(error), param=param, code=code)


def unfit(param: str, value: Any, expected: str) -> ApiError:
    """A value that does not fit its field."""
    message = f"{param} is {shown(value)}; expected {expected}"
    return ApiError(400, message, param=param, code="invalid_value")


def shown(value: Any) -> str:
    """A value of JSON in an error.

    >>> shown([1, 2]), shown("hot"), shown(None)
    ('a list of 2', '"hot"', 'null')
    """
    if isinstance(value, list):
        return f"a list of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    # The text is cut first: it may be long.
    value = value[:LONGEST_SHOWN] if isinstance(value, str) else value
    return cut(json.dumps(value, ensure_ascii=False), LONGEST_SHOWN)
