"""The time ledger of a run as text: one bar, and what ``ltui show --time`` prints. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ltui.app.presentation.run_report import columns
from ltui.training.state.time_advice import Advice
from ltui.training.state.time_ledger import Account, Part, TimeLedger
from ltui.widgets.formats import duration, percent
from ltui.widgets.sanitise import clean_line, clean_name

SIGNS: dict[Part, tuple[str, str]] = {
    Part.TRAINING: ("█", "training"),
    Part.DATA: ("▓", "waiting for data"),
    Part.COMPILATION: ("▒", "compilation, warm-up"),
    Part.VALIDATION: ("▞", "validation"),
    Part.CHECKPOINTS: ("▚", "checkpoints"),
    Part.BETWEEN: ("░", "between steps"),
    Part.START_UP: ("▁", "start-up"),
    Part.STALLS: ("!", "stalls"),
    Part.REPEATED: ("↺", "repeated steps"),
    Part.RESTARTS: ("r", "restarts"),
    Part.SHUTDOWN: ("▔", "after the last step"),
    Part.PAUSES: ("‖", "pauses"),
    Part.QUEUE: ("○", "queue"),
    Part.STOPPED: ("■", "stopped"),
    Part.UNKNOWN: ("?", "unknown"),
}
"""The sign and the words of each part, in the order of the bar."""
BAR_CELLS = 60
PARTS_IN_TABLE = 6
"""Maximum number of parts that are columns of a table; the largest ones."""
_BEFORE = "before"
"""The row of the time before the first attempt."""


def time_bar(account: Account, cells: int) -> str:
    """Return a bar of ``cells`` signs, divided like the time; a part below half a cell has none."""
    bar, done = "", 0
    for part, (sign, _) in SIGNS.items():
        done += account.us(part)
        bar += sign * (round(cells * done / max(1, account.wall_us)) - len(bar))
    return bar


def legend(account: Account) -> list[tuple[str, str, str]]:
    """Return sign and words, share and duration of each part, in the order of the bar."""
    rows = []
    for part, (sign, words) in SIGNS.items():
        if us := account.us(part):
            rows.append((f"{sign} {words}", percent(us / account.wall_us), duration(us / 1e6)))
    return rows


def summary(ledger: TimeLedger, most: int = 4) -> str:
    """Return ``goodput 81 %: 9 % repeated steps, 6 % checkpoints``; empty before the first step."""
    if ledger.goodput is None:
        return ""
    run = ledger.run
    lost = sorted(
        ((run.us(part), words) for part, (_, words) in SIGNS.items() if part is not Part.TRAINING),
        reverse=True,
    )
    texts = [f"{percent(us / run.wall_us)} {words}" for us, words in lost[:most] if us]
    return f"goodput {percent(ledger.goodput)}{': ' if texts else ''}{', '.join(texts)}"


def time_lines(
    ledger: TimeLedger, title: str, found: Sequence[Advice], limit: str = ""
) -> list[str]:
    """Return what ``ltui show --time`` prints. ``limit``: a sentence about what limits the speed,
    which no part shows if the ranks wait for each other within their steps."""
    run = ledger.run
    lines = [f"{title}: {duration(run.wall_us / 1e6)}, goodput {percent(ledger.goodput)}"]
    lines += [f"  {time_bar(run, BAR_CELLS)}"]
    lines += [f"  {line}" for line in columns(legend(run), right=frozenset((1, 2)))]
    stalls = sorted(run.stalls_us.items(), key=lambda pair: -pair[1])
    if stalls:
        texts = (f"{clean_name(kind)} {duration(us / 1e6)}" for kind, us in stalls)
        lines.append(f"  stalls by cause: {', '.join(texts)}")
    named: list[tuple[str, Sequence[Account], Callable[[int], str]]] = [
        ("attempt", ledger.attempts if len(ledger.attempts) > 1 else (), _attempt_name),
        ("machine", ledger.machines, str),
        ("rank", ledger.ranks if len(ledger.ranks) > 1 else (), str),
    ]
    for word, accounts, name_of in named:
        if accounts:
            lines += ["", *_table(word, accounts, name_of)]
    lines += ["", limit] if limit else []
    if found:
        lines += [
            "",
            "to gain, the most first",
            *(f"  {clean_line(one.text, 300)}" for one in found),
        ]
    before = len(ledger.attempts) > 1 and not ledger.attempts[0].number
    note = f" {_BEFORE.capitalize()} is the time from the launch to the first attempt."
    return [*lines, "", ledger.rule + note * before]


def _attempt_name(number: int) -> str:
    return str(number) if number else _BEFORE


def _table(word: str, accounts: Sequence[Account], name_of: Callable[[int], str]) -> list[str]:
    total = {part: sum(account.us(part) for account in accounts) for part in SIGNS}
    largest = sorted((p for p in SIGNS if total[p]), key=lambda part: -total[part])
    shown: dict[str, Sequence[Part]] = {
        words: (part,) for part, (_, words) in SIGNS.items() if part in largest[:PARTS_IN_TABLE]
    }
    if others := largest[PARTS_IN_TABLE:]:
        shown["other"] = others
    rows = [(word, "time", "goodput", *shown)]
    for account in accounts:
        wall_us = account.wall_us
        shares = (account.us(*p) / wall_us if wall_us else None for p in shown.values())
        times = duration(wall_us / 1e6), percent(account.goodput)
        rows.append((name_of(account.number or 0), *times, *map(percent, shares)))
    return columns(rows, right=frozenset(range(len(rows[0]))))
