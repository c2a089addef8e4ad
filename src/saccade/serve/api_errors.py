"""Error responses: a status and a sentence, in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from saccade.core.errors import SaccadeError, VideoInputError

log = logging.getLogger(__name__)

BUSY_DECODER_RETRY_SECONDS = 10  # A media decoder is likely to be free again after so long.
CLIENT_CLOSED_REQUEST = 499  # This is nginx's status. No client is left to read it.
INVALID_REQUEST = "invalid_request_error"
ERROR_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "unavailable_error",
    504: "timeout_error",
}


class Failure(BaseModel):
    """The ``error`` object of a response."""

    message: str
    type: str
    param: str | None
    code: int


class FailureBody(BaseModel):
    error: Failure


class ApiError(SaccadeError):
    """An error response that ends a request; ``param`` is the field that it is about."""

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
        """Returns the JSON of the response."""
        default = INVALID_REQUEST if self.status < 500 else "server_error"
        error_type = ERROR_TYPES.get(self.status, default)
        failure = Failure(message=self.message, type=error_type, param=self.param, code=self.status)
        return FailureBody(error=failure).model_dump()


def to_api_error(error: Exception) -> ApiError:
    """Returns the response for an error.

    An unexpected error is logged, and the client is told only that something went wrong.
    """
    match error:
        case ApiError():
            return error
        case HTTPException():
            return ApiError(error.status_code, str(error.detail), headers=error.headers)
        case VideoInputError():
            headers = None
            if error.code == "busy":
                headers = {"Retry-After": str(BUSY_DECODER_RETRY_SECONDS)}
            return ApiError(error.status, str(error), "messages", headers)
        case SaccadeError():
            return ApiError(400, str(error))
    log.error("A request failed.", exc_info=error)
    return ApiError(500, "something went wrong in the server")


NOT_SUPPORTED = {
    *("logit_bias", "refusal", "store", "echo", "suffix", "best_of", "use_beam_search"),
    *("length_penalty", "include_stop_str_in_output", "bad_words", "allowed_token_ids"),
    *("prompt_logprobs", "truncate_prompt_tokens", "chat_template", "documents", "modalities"),
    *("audio", "prediction", "functions", "function_call", "web_search_options"),
    *("previous_response_id", "conversation", "background", "max_tool_calls"),
    *("context_management", "moderation"),
}
"""Fields of other servers that are not supported here. The request schemas accept only values of
them that change nothing, such as null."""
FREE_FIELDS = {"metadata"}  # The client names their entries, perhaps like a field above.
WHAT_TO_DO_INSTEAD = {
    "previous_response_id": "nothing is stored here, so send the earlier items again",
    "conversation": "nothing is stored here, so send the earlier items again",
    "background": "nothing is stored here, so wait for the answer",
    "functions": "send tools",
    "function_call": "send tool_choice",
}
WRONG_TYPE_ERRORS = {"string_type", "list_type"}
UNION_TAGS = {
    *("str", "user", "system", "developer", "assistant", "tool"),
    *("dict", "json_object", "document"),
}
"""Names that pydantic puts into a field's location for the members of a union it tried."""


def validation_api_error(error: ValidationError) -> ApiError:
    """Returns the response for the first thing wrong with a request, by the name of its field."""
    errors = error.errors(include_url=False, include_input=False)
    # Where a field may be a string or a list, pydantic reports an error for each. One that says
    # only that the value has the wrong type explains nothing, so others come first.
    first = next((each for each in errors if each["type"] not in WRONG_TYPE_ERRORS), errors[0])
    is_unknown = first["type"] == "extra_forbidden"
    names = _field_names(first["loc"], is_unknown)
    # A union's member and the field in it may have the same name, such as image_url.
    field = ".".join(name for name, _ in groupby(names))
    if is_unknown:
        return ApiError(400, f"{field} is not a field this server knows: leave it out", field)
    steps = field.split(".")
    if NOT_SUPPORTED & set(steps) and steps[0] not in FREE_FIELDS:
        instead = WHAT_TO_DO_INSTEAD.get(field, "leave it out")
        return ApiError(400, f"{field} is not supported by this server: {instead}", field)
    reason = first["msg"].removeprefix("Value error, ")
    message = f"{field}: {reason[:1].lower()}{reason[1:]}" if field else reason
    return ApiError(400, message[:500], field or None)


def _field_names(location: Sequence[int | str], ends_in_name: bool) -> Iterator[str]:
    """Yields the names in a field's location, without those that pydantic adds for the members of a
    union.

    The first name is always a field's, and so is the last one if ``ends_in_name``.
    """
    for depth, step in enumerate(location):
        text = str(step)
        is_name = not depth or (ends_in_name and depth == len(location) - 1)
        is_tag = text[:1].isupper() or "[" in text or text in UNION_TAGS
        if is_name or not is_tag:
            yield text[:40]
