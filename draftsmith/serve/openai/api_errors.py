"""Errors in the shape of OpenAI's API."""

import json
from collections.abc import Mapping
from typing import Any

from decode.base.errors import UserError

LONGEST_MESSAGE = 1000  # characters
LONGEST_PARAM = 200  # characters
LONGEST_SHOWN = 60  # characters of a value or a name of the client


class ApiError(Exception):
    """An answer with an error status. retry_after: seconds; None: the same request would fail
    again. headers: more of the answer. What the client has sent is shown in part only."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = cut(message, LONGEST_MESSAGE)
        super().__init__(message)
        self.status = status
        named = None if param is None else cut(param, LONGEST_PARAM)
        self.body = {"error": {"message": message, "type": kind, "param": named, "code": code}}
        # OpenAI's client tries an error ≥ 500 again unless it is told not to.
        again = {"x-should-retry": "false"}
        if retry_after is not None:
            again = {"retry-after": str(retry_after)}
        self.headers = again | dict(headers or {})


def refused(error: UserError, param: str | None = None) -> ApiError:
    """A request that the decode refuses."""
    return ApiError(400, str(error), param=param)


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


def cut(text: str, longest: int) -> str:
    """A text of at most this number of characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
