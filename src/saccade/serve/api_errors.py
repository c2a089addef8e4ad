"""Turns errors into the server's error responses: a status and a sentence, in OpenAI's form."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
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


class ErrorObject(BaseModel):
    """The ``error`` object of a response."""

    message: str
    type: str
    param: str | None  # The field of the request to mend, if it is known.
    code: int  # The HTTP status.


class ErrorBody(BaseModel):
    error: ErrorObject


class ApiError(SaccadeError):
    """An error response that ends a request; ``param`` is the field of the request to mend."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.headers = status, message, param, headers

    def with_field_names(self, names: Mapping[str, str]) -> ApiError:
        """Returns the same error with fields called as the client calls them.

        ``names`` has such a name for each field that the server calls differently.
        """
        message = self.message
        for server_name, client_name in names.items():
            # A word within the name of a file, as in "messages.mp4", is no field.
            field = rf"(?<![\w./\\-]){server_name}(?!\w|[/\\-]\w|\.[A-Za-z])"
            message = re.sub(field, client_name, message)
        param = None if self.param is None else names.get(self.param, self.param)
        return ApiError(self.status, message, param, self.headers)

    def body(self) -> dict[str, Any]:
        """Returns the JSON of the response."""
        default = INVALID_REQUEST if self.status < 500 else "server_error"
        error_type = ERROR_TYPES.get(self.status, default)
        failure = ErrorObject(
            message=self.message, type=error_type, param=self.param, code=self.status
        )
        return ErrorBody(error=failure).model_dump()


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
# Fields whose entries the client names as it likes, so that an entry may be called "store".
FREE_FIELDS = {"metadata"}
WHAT_TO_DO_INSTEAD = {
    "previous_response_id": "nothing is stored here, so send the earlier items again",
    "conversation": "nothing is stored here, so send the earlier items again",
    "background": "nothing is stored here, so wait for the answer",
    "functions": "send tools",
    "function_call": "send tool_choice",
}
WRONG_TYPE_ERRORS = {"string_type", "list_type", "literal_error"}
"""Pydantic's types of errors for a value of the wrong type. If a field may have several types,
pydantic reports such an error for each type that does not fit, even where another one does."""
ABSENT_OR_UNKNOWN = {"missing", "extra_forbidden"}
"""Pydantic's types of errors whose location ends in a field that the client did not send, or that
no schema has."""


def validation_api_error(error: ValidationError, body: Any) -> ApiError:
    """Returns the response for a request that pydantic refused.

    It names one field to mend, unless the error is about the request as a whole, as with invalid
    JSON.

    ``body`` is the request's JSON, in which the error's location is looked up. It is None if the
    JSON could not be parsed, or if what pydantic refused was an object made from the JSON.
    """
    errors = error.errors(include_url=False, include_input=False)
    names_by_error = [
        _field_names(each["loc"], body, each["type"] in ABSENT_OR_UNKNOWN) for each in errors
    ]
    # For a field that may be a string or a list, pydantic reports an error for each. If the client
    # sent a list with a wrong entry, these are "content is no string" and an error of the entry.
    # Only the second helps the client. It is the one that is not about the type, or else the one
    # that lies deeper in the body.
    chosen_error, names = max(
        zip(errors, names_by_error, strict=True),
        key=lambda pair: (pair[0]["type"] not in WRONG_TYPE_ERRORS, len(pair[1])),
    )
    is_unknown = chosen_error["type"] == "extra_forbidden"
    field = ".".join(names)
    if is_unknown:
        return ApiError(400, f"{field} is not a field this server knows: leave it out", field)
    steps = field.split(".")
    if NOT_SUPPORTED & set(steps) and steps[0] not in FREE_FIELDS:
        instead = WHAT_TO_DO_INSTEAD.get(field, "leave it out")
        return ApiError(400, f"{field} is not supported by this server: {instead}", field)
    reason = chosen_error["msg"].removeprefix("Value error, ")
    message = f"{field}: {reason[:1].lower()}{reason[1:]}" if field else reason
    return ApiError(400, message[:500], field or None)


def _field_names(location: Sequence[int | str], body: Any, ends_in_name: bool) -> tuple[str, ...]:
    """Returns the names of an error's location that are fields or indices of the body.

    For a message whose ``content`` is 5, pydantic's location is ("messages", 0, "user", "content",
    "function-before[...]"), because it also names the members of unions that were tried: the user's
    message, and a string. This returns ("messages", "0", "content").

    With ``ends_in_name`` the last step is returned even if the body has no such field. Without a
    body all steps are returned. Each is cut to 40 characters.
    """
    if body is None:
        return tuple(str(step)[:40] for step in location)
    names: list[str] = []
    for depth, step in enumerate(location):
        leads_on, inner = _follow(body, step)
        if leads_on:
            body = inner
        elif not (ends_in_name and depth == len(location) - 1):
            continue
        names.append(str(step)[:40])
    return tuple(names)


def _follow(body: Any, step: int | str) -> tuple[bool, Any]:
    """Returns whether a step leads to something in the body, and to what."""
    if isinstance(body, BaseModel):
        body = dict(body)
    if isinstance(body, Mapping):
        return step in body, body.get(step)
    if isinstance(body, Sequence) and isinstance(step, int) and step < len(body):
        return True, body[step]
    return False, None
