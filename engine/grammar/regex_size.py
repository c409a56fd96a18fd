"""How far a regular expression multiplies itself: counted repetitions inside others."""

from __future__ import annotations

MAX_REPEATS = 100_000


def repeats(pattern: str) -> int:
    """The largest number of times that a part of `pattern` must be written out: the product of the counts around it.

    Braces that are no count, and what stands in brackets or behind a backslash, are text. Brackets that do not match are left to
    the compiler. One pass over the pattern.
    """
    groups = [1]  # per open group: the largest product within it
    atom, at = 1, 0  # the product of what a count would repeat
    while at < len(pattern):
        char = pattern[at]
        if char == "{" and (end := pattern.find("}", at, at + 32)) > 0 and (count := _count(pattern[at + 1 : end])):
            atom *= count
            groups[-1] = max(groups[-1], atom)
            at = end + 1
            continue
        if char == "(":
            groups.append(1)
        elif char == ")" and len(groups) > 1:
            atom = groups.pop()
            groups[-1] = max(groups[-1], atom)
        elif char not in "*+?":
            atom = 1
            if char == "\\":
                at += 1
            elif char == "[":
                at = _class_end(pattern, at)
        at += 1
    return max(groups)


def _count(text: str) -> int:
    """Of m, m, or m,n: the larger one; 0: no count."""
    parts = text.split(",")
    if len(parts) > 2 or not all(part.isdecimal() for part in parts if part) or not parts[0]:
        return 0
    return max(1, *(int(part or 0) for part in parts))


def _class_end(pattern: str, at: int) -> int:
    """Where the class that begins at `at` ends; the pattern's end, if nowhere."""
    at += 1
    if pattern[at : at + 1] == "^":
        at += 1
    first = True
    while at < len(pattern) and (pattern[at] != "]" or first):
        at += 2 if pattern[at] == "\\" else 1
        first = False
    return at
