"""What the caller of a request reads of a load that failed. Pure.

A worker's error of a load names the worker, the folder and the adapter's id, or quotes the operating system. That is for
operators, who find it in the logs. Such an error names the field ADAPTER.
"""

from __future__ import annotations

from diptych.common.errors import DiptychError, InternalError, NoWorkerError, OverloadedError
from diptych.common.request import ADAPTER


def without_details(error: DiptychError, what: str = "the adapter") -> DiptychError:
    """The error itself, unless a load failed. Args: what: the adapter, as the caller knows it."""
    if error.param != ADAPTER:
        return error
    if isinstance(error, NoWorkerError):
        text = f"{what} cannot be loaded"
    elif isinstance(error, OverloadedError):
        text = f"there is no room for {what}: requests use all that a worker keeps"
    elif isinstance(error, InternalError):
        text = f"loading {what} failed"
    else:
        return error
    return type(error)(text, param=ADAPTER, retry_after_s=error.retry_after_s)
