"""The errors of all servers, in the shape of OpenAI's API."""

from collections.abc import Mapping

from starlette.responses import JSONResponse

LONGEST_MESSAGE = 1000  # characters
LONGEST_PARAM = 200  # characters


class ApiError(Exception):
    """An answer with an error status. retry_after: seconds; None: the same request would fail
    again. headers: more of the answer. What the client has sent is shown in part only."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = cut(message, LONGEST_MESSAGE)
        super().__init__(message)
        self.status = status
        named = None if param is None else cut(param, LONGEST_PARAM)
        kind = kind or ("server_error" if status >= 500 else "invalid_request_error")
        self.body = {"error": {"message": message, "type": kind, "param": named, "code": code}}
        # OpenAI's client tries an error ≥ 500 again unless it is told not to.
        again = {"x-should-retry": "false"}
        if retry_after is not None:
            again = {"retry-after": str(retry_after)}
        self.headers = again | dict(headers or {})

    def response(self) -> JSONResponse:
        """The answer."""
        return JSONResponse(self.body, self.status, self.headers)


def cut(text: str, longest: int) -> str:
    """A text of at most this number of characters."""
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
