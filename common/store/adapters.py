"""The registry of adapters: names, their versions, and the one that answers a request. Pure.

    name --> versions 1, 2, 3, ...       each has an id (a hash of its content) and the folder of its files
         --> stable                      answers
             canary, canary_share        answers that share of the requests instead
             previous                    was stable before: a rollback returns to it

A name is a label. Behind the router only ids exist, so that other weights under the same name are another identity. The
choice depends only on the name and the request's id: every router, and every retry, makes the same one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from diptych.common.errors import InvalidRequestError

MAX_ADAPTERS = 1024
"""Most names of a cluster."""
MAX_GONE = 1024
"""Unloaded names whose last number is kept; the ones that were unloaded longest ago are forgotten."""
RESTORED_STEP = 1000
"""What is added to the revision where a router writes what it knows over what a store has lost. More than one: another router may
know a few changes more, and must see that this is another registry than its own."""
MAX_VERSIONS = 8
"""Of one name; older ones are forgotten."""
MAX_FOLDER_CHARS = 4096
MAX_NAME_CHARS = 128
NAME_RULE = "1 to 128 letters, digits or ._:/-, the first a letter or digit"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_SCALE = 2**32


class AdapterVersion(msgspec.Struct, frozen=True):
    """One version of an adapter.

    Args:
        number: from 1, rising; never used twice for a name.
        adapter_id: 32 hexadecimal digits, the hash of configuration and tensors.
        folder: of its files, as workers open it.
        rank: the largest of its modules.
        num_bytes: of its tensors.
        created: Unix seconds.
        other_base: the base model that its configuration names, where that is another one than it was loaded for; else "".
    """

    number: int
    adapter_id: str
    folder: str
    rank: int
    num_bytes: int
    created: int
    other_base: str = ""


class AdapterEntry(msgspec.Struct, frozen=True):
    """What the registry knows of a name. `model`: the base model's name. See the module for the other fields; 0: none."""

    name: str
    model: str
    versions: tuple[AdapterVersion, ...]
    stable: int
    canary: int = 0
    canary_share: float = 0.0
    previous: int = 0

    def version(self, number: int) -> AdapterVersion:
        """Raises: InvalidRequestError for a number that is not kept."""
        for version in self.versions:
            if version.number == number:
                return version
        kept = ", ".join(str(version.number) for version in self.versions)
        raise InvalidRequestError(f"version: {self.name} has no version {number}; it has {kept}", param="version")

    def has(self, number: int) -> bool:
        return any(version.number == number for version in self.versions)

    @property
    def last_number(self) -> int:
        """The greatest that is kept, which is the latest: see _pruned."""
        return max(version.number for version in self.versions)

    @property
    def adapter_ids(self) -> frozenset[str]:
        """Of all versions that are kept."""
        return frozenset(version.adapter_id for version in self.versions)


class AdapterTable(msgspec.Struct, frozen=True):
    """The whole registry. `revision`: rises with every change; 0: the store has none. `gone`: the last version's number of
    names that were unloaded, the latest at the end."""

    revision: int = 0
    entries: Mapping[str, AdapterEntry] = {}
    gone: Mapping[str, int] = {}

    def next_number(self, name: str) -> int:
        """Of a name's next version: a number that had other weights never comes again."""
        entry = self.entries.get(name)
        return 1 + (self.gone.get(name, 0) if entry is None else entry.last_number)

    def gone_after(self, name: str, after: AdapterEntry | None) -> dict[str, int]:
        """`gone` once the name has this entry; None: once it is unloaded."""
        last = self.next_number(name) - 1
        gone = {other: number for other, number in self.gone.items() if other != name}
        if after is None and last:
            gone[name] = last
        return dict(list(gone.items())[-MAX_GONE:])


def restored(known: AdapterTable, found: AdapterTable) -> AdapterTable | None:
    """What a router writes over a registry that has lost changes: one that is gone, or is an earlier one, as of a replica or of a
    snapshot. It is what the router knows, and names that it neither has nor has seen unloaded. None: nothing is lost, or
    the registry has another history: a version of the same number has other content."""
    if found.revision >= known.revision:
        return None
    contents = {(name, one.number): one.adapter_id for name, entry in known.entries.items() for one in entry.versions}
    for name, entry in found.entries.items():
        if any(contents.get((name, one.number), one.adapter_id) != one.adapter_id for one in entry.versions):
            return None
    more = [item for item in found.entries.items() if item[0] not in known.gone and item[0] not in known.entries]
    entries = {**known.entries, **dict(more[: MAX_ADAPTERS - len(known.entries)])}
    gone = {name: number for name, number in {**found.gone, **known.gone}.items() if name not in entries}
    return AdapterTable(known.revision, entries, dict(list(gone.items())[-MAX_GONE:]))


@dataclass(frozen=True, slots=True)
class ChosenAdapter:
    """The one version that answers a request, under the name by which it was asked for. `pinned`: the request named it."""

    name: str
    version: AdapterVersion
    pinned: bool = False

    @property
    def adapter_id(self) -> str:
        return self.version.adapter_id


def is_adapter_name(name: str) -> bool:
    """Whether this could be an adapter's name, see NAME_RULE."""
    return _NAME.fullmatch(name) is not None


def check_name(name: object) -> str:
    """Raises: InvalidRequestError naming `lora_name`."""
    if not isinstance(name, str) or not is_adapter_name(name):
        raise InvalidRequestError(f"lora_name must be {NAME_RULE}", param="lora_name")
    return name


def check_share(share: object) -> float:
    """Raises: InvalidRequestError naming `canary_share`."""
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0.0 <= share <= 1.0:
        raise InvalidRequestError("canary_share must be a number from 0 to 1", param="canary_share")
    return float(share)


def resolve(entry: AdapterEntry, request_id: str) -> AdapterVersion:
    """The version that answers the request of this id."""
    is_canary = entry.canary and _draw(entry.name, request_id) < entry.canary_share
    return entry.version(entry.canary if is_canary else entry.stable)


def _draw(name: str, request_id: str) -> float:
    """A number in [0, 1), the same for the same name and id."""
    digest = blake2b(f"{name}\0{request_id}".encode(), digest_size=4, person=b"adapter").digest()
    return int.from_bytes(digest, "big") / _SCALE


def check_load(entry: AdapterEntry | None, name: str, model: str, *, in_place: bool, canary_share: float) -> None:
    """Args: as `with_version`; model: the base model's name. Raises: InvalidRequestError where the name exists and neither is
    given, or belongs to another model, or a canary has no stable version beside it: whatever the files hold."""
    if entry is None:
        if canary_share:
            rule = f"canary_share: {name} has no version yet that the canary could be compared with"
            raise InvalidRequestError(rule, param="canary_share")
        return
    if entry.model != model:
        rule = f"lora_name: {name} is an adapter of the model {entry.model!r}, not of {model!r}"
        raise InvalidRequestError(rule, param="lora_name")
    if not in_place and not canary_share:
        raise InvalidRequestError(
            f"The lora adapter '{entry.name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True (`diptych adapters load`: --in-place, or --canary-share for a part of the requests).",
            param="lora_name",
        )


def with_version(
    entry: AdapterEntry | None, fresh: AdapterEntry, *, in_place: bool = False, canary_share: float = 0.0
) -> AdapterEntry:
    """The entry after a load.

    Args:
        entry: of that name so far; None: there is none.
        fresh: the loaded version, as the only one of a new entry.
        in_place: replace the stable version of a name that exists.
        canary_share: above 0: the version becomes the canary instead.
    Raises: InvalidRequestError as `check_load`, and where another stable version would end a canary.
    """
    check_load(entry, fresh.name, fresh.model, in_place=in_place, canary_share=canary_share)
    if entry is None:
        return fresh
    (loaded,) = fresh.versions
    current = entry.version(entry.canary if canary_share and entry.canary else entry.stable)
    same = (current.adapter_id, current.folder) == (loaded.adapter_id, loaded.folder)
    if same and not canary_share:
        return entry  # it is the stable version: a canary beside it goes on
    if entry.canary and not canary_share:
        raise InvalidRequestError(
            f"load_inplace: {entry.name} has a canary, version {entry.canary}, and another stable version would end it: promote "
            "it, or roll it back, first",
            param="load_inplace",
        )
    if not same:
        current = msgspec.structs.replace(loaded, number=entry.last_number + 1)
        entry = msgspec.structs.replace(entry, versions=(*entry.versions, current))
    if canary_share:
        return with_canary(entry, current.number, canary_share)
    return _pruned(_pointed(entry, current.number))


def _pointed(entry: AdapterEntry, number: int) -> AdapterEntry:
    """With another stable version, and no canary."""
    previous = entry.previous if number == entry.stable else entry.stable
    return msgspec.structs.replace(entry, stable=number, previous=previous, canary=0, canary_share=0.0)


def with_canary(entry: AdapterEntry, number: int, share: float) -> AdapterEntry:
    """With a canary for a share of the requests; 0.0: without one. Raises: InvalidRequestError for a version that is not
    kept, or the stable one."""
    if number:
        entry.version(number)
    if not share:
        return _pruned(msgspec.structs.replace(entry, canary=0, canary_share=0.0))
    if not number:
        raise InvalidRequestError(f"version: {entry.name} has no canary: name a version", param="version")
    if number == entry.stable:
        raise InvalidRequestError(f"version: {number} is the stable version of {entry.name}", param="version")
    return _pruned(msgspec.structs.replace(entry, canary=number, canary_share=share))


def promoted(entry: AdapterEntry) -> AdapterEntry:
    """The canary becomes the stable version. Raises: InvalidRequestError without one."""
    if not entry.canary:
        raise InvalidRequestError(f"lora_name: {entry.name} has no canary to promote", param="lora_name")
    return _pruned(_pointed(entry, entry.canary))


def rolled_back(entry: AdapterEntry, to: int = 0) -> AdapterEntry:
    """Without the canary; or, if there is none, with the version before as the stable one. `to`: this version becomes
    stable in any case. Raises: InvalidRequestError where there is none to go back to."""
    if to:
        entry.version(to)
        return _pruned(_pointed(entry, to))
    if entry.canary:
        return with_canary(entry, 0, 0.0)
    if not entry.previous or not entry.has(entry.previous):
        raise InvalidRequestError(f"lora_name: {entry.name} has no earlier version to go back to", param="lora_name")
    return _pruned(msgspec.structs.replace(entry, stable=entry.previous, previous=0))


def newly_answering(before: AdapterEntry, after: AdapterEntry) -> list[AdapterVersion]:
    """The versions that answer requests after a change of pointers, or more of them than before."""
    numbers = [after.stable] if after.stable != before.stable else []
    if after.canary and (after.canary, after.canary_share) != (before.canary, before.canary_share):
        numbers.append(after.canary)
    return [after.version(number) for number in numbers]


def lost_versions(versions: Iterable[tuple[int, str, str]]) -> str:
    """A warning, or "". The files of earlier versions were replaced by those of the last one: they cannot be loaded again.

    Args:
        versions: (number, id, folder) of each, the last one at the end.
    """
    *earlier, (last, last_id, folder) = versions
    lost = [str(number) for number, adapter_id, at in earlier if at == folder and adapter_id != last_id]
    if not lost:
        return ""
    many = "versions" if len(lost) > 1 else "version"
    return (
        f"version {last} was loaded from the folder of {many} {', '.join(lost)}, whose files are gone: no rollback to "
        "them is possible. Give each version a folder of its own."
    )


def other_base_models(model: str, versions: Iterable[tuple[int, str]]) -> str:
    """A warning, or "". Versions that were trained for another base model than `model`, by what they say.

    Args:
        versions: (number, AdapterVersion.other_base) of each.
    """
    others = [f"version {number} was trained for {other}" for number, other in versions if other]
    if not others:
        return ""
    return f"{', '.join(others)}, by its configuration, and answers for {model}: what it says may make no sense."


def _pruned(entry: AdapterEntry) -> AdapterEntry:
    """With the versions that the entry points to, and the latest others."""
    pointed = {entry.stable, entry.canary, entry.previous}
    others = [version.number for version in entry.versions if version.number not in pointed]
    kept = pointed | set(others[max(0, len(others) - (MAX_VERSIONS - len(pointed - {0}))) :])
    return msgspec.structs.replace(entry, versions=tuple(v for v in entry.versions if v.number in kept))


def unused_ids(before: AdapterEntry, after: AdapterEntry | None, table: AdapterTable) -> frozenset[str]:
    """Ids of `before` that neither `after` nor another name of the table has: workers need not keep them."""
    used = {one for entry in table.entries.values() if entry.name != before.name for one in entry.adapter_ids}
    return before.adapter_ids - used - (after.adapter_ids if after is not None else frozenset())
