"""From the names in a request to the base model and the one version of an adapter that answers it. Pure.

    model "base"                    the base model
    model "poems"                   the adapter poems of its base model
    model "" or "base", adapter "poems"     the same
    adapter_version 3               that version, instead of the stable one or the canary

The version is chosen once, when the request is admitted. Attempts, choices, beams and a resumed answer all have it, since
it is a part of the prompt's identity.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from diptych.common.errors import InvalidRequestError, ModelNotFoundError
from diptych.common.store.adapters import AdapterEntry, ChosenAdapter, resolve

Allowed = Callable[[str, str], bool]
"""(tenant, name of an adapter): whether the tenant may use it."""


def anybody(tenant: str, name: str) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """An adapter that a request names, before its version is chosen. `version`: that one; 0: by the request's id."""

    entry: AdapterEntry
    version: int = 0

    def of_request(self, request_id: str) -> ChosenAdapter:
        """Raises: InvalidRequestError naming a version that is not kept."""
        if not self.version:
            return ChosenAdapter(self.entry.name, resolve(self.entry, request_id))
        if not self.entry.has(self.version):
            rule = f"adapter_version: {self.entry.name} has no version {self.version}"
            raise InvalidRequestError(rule, param="adapter_version")
        return ChosenAdapter(self.entry.name, self.entry.version(self.version), pinned=True)

    def likely(self, request_id: str) -> Iterator[ChosenAdapter]:
        """Every version that may have begun the answer of this request: `of_request` first, then those that were, before
        the registry changed."""
        first = self.of_request(request_id)
        yield first
        if not first.pinned:
            for version in reversed(self.entry.versions):
                if version != first.version:
                    yield ChosenAdapter(self.entry.name, version)


_SHOWN = 4
"""Adapters that an error names."""


def unknown_model(name: str, models: Collection[str], adapters: Collection[str]) -> ModelNotFoundError:
    """`adapters`: those that the caller may use."""
    shown = name[:128].encode("ascii", "replace").decode()
    there = [repr(one) for one in models]
    text = f"the model {shown!r} does not exist; there {'is' if len(there) == 1 else 'are'} {', '.join(there)}"
    if adapters:
        named = ", ".join(repr(one) for one in sorted(adapters)[:_SHOWN])
        more = f" and {len(adapters) - _SHOWN} more" if len(adapters) > _SHOWN else ""
        text += f", with adapters {named}{more}"
    return ModelNotFoundError(text, param="model")


def named_adapter(model: object, adapter: object, models: Collection[str]) -> tuple[str, str]:
    """(name of the adapter, field that names it); ("", ""): the request wants a base model, or an invalid value stands
    where the check of the model reports it. `models`: names of the base models. Raises: InvalidRequestError."""
    if adapter is not None and not isinstance(adapter, str):
        raise InvalidRequestError("adapter must be text", param="adapter")
    named = model if isinstance(model, str) and model not in ("", *models) else ""
    if adapter and named and named != adapter:
        rule = f"adapter {adapter[:128]!r} and model {named[:128]!r} name two adapters, or a model that is not served"
        raise InvalidRequestError(rule, param="adapter")
    return (adapter, "adapter") if adapter else (named, "model" if named else "")


def checked_choice(
    entry: AdapterEntry | None, name: str, param: str, *, model: object, version: object, models: Collection[str]
) -> AdapterChoice | None:
    """The choice; None: `name` stands where a model does, and is no adapter: the check of the model reports it.

    Args:
        entry: of that name; None: there is none, or the tenant may not use it: both have the same answer.
        param: the field that has the name.
    Raises: ModelNotFoundError for an adapter that is unknown, or belongs to another model; InvalidRequestError for a
        version that is none.
    """
    if isinstance(version, bool) or not (version is None or isinstance(version, int)) or (version or 0) < 0:
        raise InvalidRequestError("adapter_version must be a whole number from 1", param="adapter_version")
    if entry is not None and entry.model in models and model in ("", name, entry.model):
        return AdapterChoice(entry, version or 0)
    if param != "adapter":
        return None
    shown = name[:128].encode("ascii", "replace").decode()
    of = f" of the model {entry.model!r}, not" if entry is not None and entry.model in models else ""
    raise ModelNotFoundError(
        f"the adapter {shown!r} does not exist" if not of else f"{shown!r} is an adapter{of} of this one", param=param
    )
