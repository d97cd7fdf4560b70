"""Expansion of SLURM's lists of hosts, such as ``gpu[01-03,7],login``. Pure.

SLURM's own ``scontrol show hostnames`` does the same, but is missing in most containers.
"""

from __future__ import annotations

import re

MAX_HOSTS = 65_536
"""Greatest number of hosts that a list may stand for; SLURM has the same limit."""
_NUMBERS = re.compile(r"(\d+)(?:-(\d+))?")


def expand_hosts(text: str) -> tuple[str, ...]:
    """Return the hosts of a list in its order. Raise ``ValueError`` if it is malformed.

    Leading zeros are kept: ``n[08-10]`` is n08, n09, n10. A name may have several brackets.
    """
    hosts: list[str] = []
    for entry in _split_outside_brackets(text.strip()):
        hosts += _expand_name(entry, MAX_HOSTS - len(hosts))
    return tuple(hosts)


def _split_outside_brackets(text: str) -> list[str]:
    """Split at the commas that are not within brackets."""
    entries, depth, begin = [], 0, 0
    for at, character in enumerate(text):
        depth += {"[": 1, "]": -1}.get(character, 0)
        if not 0 <= depth <= 1:
            raise ValueError(f"the brackets of `{text[:60]}` do not match")
        if character == "," and depth == 0:
            entries.append(text[begin:at])
            begin = at + 1
    if depth:
        raise ValueError(f"the brackets of `{text[:60]}` do not match")
    return [entry.strip() for entry in [*entries, text[begin:]] if entry.strip()]


def _expand_name(entry: str, limit: int) -> list[str]:
    """Return the hosts of one name with brackets, the last bracket counting fastest."""
    prefix, bracket, rest = entry.partition("[")
    if not bracket:
        names = [entry]
    else:
        inside, _, suffix = rest.partition("]")
        ends = _expand_name(suffix, limit) if suffix else [""]
        numbers = _numbers(inside, limit // len(ends))
        names = [prefix + number + end for number in numbers for end in ends]
    if len(names) > limit:
        raise ValueError(f"the list has more than {MAX_HOSTS} hosts")
    return names


def _numbers(text: str, limit: int) -> list[str]:
    """Return the numbers of ``1-3,07``, with leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _NUMBERS.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"`[{text[:60]}]` is not a list of numbers")
        first, last = match[1], match[2] or match[1]
        span = range(int(first), int(last) + 1)
        if not span or len(numbers) + len(span) > limit:
            raise ValueError(f"`[{text[:60]}]` is no range of at most {limit} hosts")
        numbers += [str(number).zfill(len(first)) for number in span]
    return numbers
