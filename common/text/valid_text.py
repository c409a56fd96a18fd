"""Text that can become a prompt."""

from __future__ import annotations

from diptych.common.errors import InvalidRequestError


def check_text(text: str, param: str) -> bytes:
    """The text as UTF-8. Raises: InvalidRequestError for a lone surrogate, which UTF-8 cannot express."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{param} holds a lone surrogate: not valid Unicode text", param=param) from None
