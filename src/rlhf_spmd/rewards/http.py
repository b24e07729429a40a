"""Scores from a server: sends batches of rows as JSON, and repeats requests after temporary failures.

Each request is a POST of ``{"prompts": [...], "completions": [...], "rows": [...]}``: prompts and completions as in TRL
(texts or lists of messages), and the columns of each row. The answer is ``{"scores": [...]}`` with a number, an object
with ``score``, or null (the reward does not apply) for each. ``rlhf-spmd reward-server`` is such a server.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any

from rlhf_spmd.config.constraints import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from rlhf_spmd.config.json_input import parse_json

TEMPORARY = (408, 425, 429, 500, 502, 503, 504)  # HTTP codes of failures that may pass


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirects: the token is only for the named server."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def check(where: str, url: str, token_env: str | None = None, **_: float) -> None:
    """Raise ValueError for a bad setting, and if the token's environment variable is missing."""
    parts = urllib.parse.urlsplit(str(url))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None:
        raise ValueError(
            f"{where}.url must be http:// or https:// with a host and without a user name; it is {parts.scheme!r}://..."
        )
    if token_env is not None and not os.environ.get(token_env):
        raise ValueError(f"{where}.token_env={token_env!r}: there is no such variable in the environment")


def score(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    row: Sequence[dict[str, Any]],
    url: str,
    token_env: str | None = None,
    batch_size: PositiveInt = 64,
    retries: NonNegativeInt = 3,
    request_timeout_s: PositiveFloat = 5.0,
    backoff_s: NonNegativeFloat = 0.25,
) -> list[Any]:
    """Return the server's scores; rows of a request that finally failed get the error.

    ``token_env``: environment variable with the bearer token. ``request_timeout_s``: limit of one attempt; the wait
    before the next starts at ``backoff_s`` and doubles. ``reward.timeout_s`` must cover all requests of a call.
    """
    headers = {"Content-Type": "application/json"}
    if token_env is not None:
        headers["Authorization"] = f"Bearer {os.environ[token_env]}"
    scores: list[Any] = []
    for first in range(0, len(prompts), batch_size):
        part = slice(first, first + batch_size)
        body = json.dumps({"prompts": prompts[part], "completions": completions[part], "rows": row[part]}).encode()
        request = urllib.request.Request(url, body, headers, method="POST")
        try:
            values = _ask(request, retries, request_timeout_s, backoff_s)["scores"]
            if len(values) != len(prompts[part]):
                raise ValueError(f"the server gave {len(values)} scores for {len(prompts[part])} rows")
            scores += values
        except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
            scores += [RuntimeError(f"{_place(url)}: {type(error).__name__}: {error}")] * len(prompts[part])
    return scores


def _ask(request: urllib.request.Request, retries: int, timeout_s: float, backoff_s: float) -> Any:
    """Return the answer. Raises OSError or HTTPException (cut off) of the last attempt, and ValueError for invalid JSON."""
    for attempt in range(retries + 1):
        try:
            with _OPENER.open(request, timeout=timeout_s) as answer:
                return parse_json(answer.read())
        except (OSError, HTTPException) as error:
            is_temporary = not isinstance(error, urllib.error.HTTPError) or error.code in TEMPORARY
            if attempt == retries or not is_temporary:
                raise
        time.sleep(backoff_s * 2**attempt)
    raise AssertionError("the last try returns or raises")


def _place(url: str) -> str:
    """Return the URL without parts that may be secret."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{f':{parts.port}' if parts.port else ''}{parts.path}"
