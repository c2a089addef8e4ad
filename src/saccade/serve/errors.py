"""What a client is told instead of an answer: a status and a sentence, in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from saccade.core.errors import OptionError, SaccadeError, VideoInputError

log = logging.getLogger(__name__)

RETRY = "10"  # seconds after which a decoder is likely to be free
HUNG_UP = 499  # the status nobody reads
INVALID = "invalid_request_error"
KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class Failure(BaseModel):
    """An error's body."""

    message: str
    type: str
    param: str | None
    code: int


class FailureBody(BaseModel):
    error: Failure


class ApiError(SaccadeError):
    """What ends a request, as its client is told: ``param`` is the field it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def body(self) -> dict[str, Any]:
        kind = KINDS.get(self.status) or ("server_error", INVALID)[self.status < 500]
        failure = Failure(message=self.message, type=kind, param=self.param, code=self.status)
        return FailureBody(error=failure).model_dump()


def api_error(error: Exception) -> ApiError:
    """An error as a client is told it; of one that is none of ours only that there was one."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case VideoInputError():
            later = {"Retry-After": RETRY} if error.code == "busy" else None
            return ApiError(error.status, str(error), "messages", later)
        case SaccadeError():
            return ApiError(400, str(error), "messages" if isinstance(error, OptionError) else None)
    log.error("a request failed", exc_info=error)
    return ApiError(500, "something went wrong in the server")


NOT_SUPPORTED = {
    *("presence_penalty", "frequency_penalty", "logit_bias", "refusal"),
    *("store", "echo", "suffix", "best_of"),
}
"""Fields of which only values that change nothing are taken."""
WRONG_KIND = {"string_type", "list_type"}
ALTERNATIVES = {
    *("str", "user", "system", "developer", "assistant", "tool"),
    *("dict", "json_object", "document"),
}


def invalid(error: ValidationError) -> ApiError:
    """The first thing wrong with a request, by the name of its field."""
    found = error.errors(include_url=False, include_input=False)
    # of the forms that a field may have, the one whose kind fits says more
    first = next((each for each in found if each["type"] not in WRONG_KIND), found[0])
    field = ".".join(step for step, _ in groupby(_steps(first["loc"])))
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{field} is not a field this server knows: leave it out", field)
    if NOT_SUPPORTED & set(field.split(".")):
        return ApiError(400, f"{field} is not supported by this server: leave it out", field)
    said = first["msg"].removeprefix("Value error, ")
    message = f"{field}: {said[:1].lower()}{said[1:]}" if field else said
    return ApiError(400, message[:500], field or None)


def _steps(location: Sequence[int | str]) -> Iterator[str]:
    """A field's location without the names of the alternatives that were tried there."""
    for step in location:
        text = str(step)
        if not text[:1].isupper() and "[" not in text and text not in ALTERNATIVES:
            yield text[:40]
