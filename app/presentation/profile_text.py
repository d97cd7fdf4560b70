"""The lines that show a profile, in the terminal and on the screen. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from ltui.training.diagnosis.profile_summary import Profile, ProfileState, change_text
from ltui.training.diagnosis.trace_times import NamedTime, RankProfile
from ltui.widgets import formats
from ltui.widgets.sanitise import clean_line

_NAME = 64
"""Characters of the name of an operator."""


def profile_lines(profile: Profile, *, operators: int = 10) -> Iterator[str]:
    """Yield the lines of a profile. ``operators``: how many of each rank are named."""
    if profile.state is not ProfileState.DONE:
        yield f"Profile {profile.number}: {clean_line(profile.progress, 400)}."
        return
    yield f"Profile {profile.number}, steps {profile.first} to {profile.last}"
    yield clean_line(profile.sentence or "", 300)
    yield clean_line(profile.remedy or "", 300)
    if (difference := profile.difference) is not None:
        parts = ", ".join(f"{_ms(part.seconds)} {_name(part)}" for part in difference.parts)
        yield ""
        yield f"Rank {difference.slow} more than rank {difference.other}: {parts or 'n/a'}"
    yield ""
    yield _row("a step of rank", [str(each.rank) for each in profile.profiles])
    yield from _split_rows(profile.profiles)
    for each in profile.profiles:
        yield ""
        yield from _rank_lines(each, operators)
    yield ""
    if (change := change_text(profile)) is not None:
        yield f"The {change}."
    yield f"Traces, for https://ui.perfetto.dev: {clean_line(profile.folder, 300)}"


def _split_rows(profiles: tuple[RankProfile, ...]) -> Iterator[str]:
    splits = [each.split for each in profiles]
    yield _row("computing", [_part(s.computing_s, s.step_s) for s in splits])
    yield _row("communication, exposed", [_part(s.exposed_s, s.step_s) for s in splits])
    yield _row("copies", [_part(s.copies_s, s.step_s) for s in splits])
    yield _row("idle: waits for data", [_part(s.data_s, s.step_s) for s in splits])
    yield _row("idle: host", [_part(s.host_s, s.step_s) for s in splits])
    yield _row("together", [_ms(s.step_s) for s in splits])
    yield _row("communication, overlapped", [_ms(s.overlapped_s) for s in splits])


def _row(title: str, cells: list[str]) -> str:
    return f"{title:<26}" + "".join(f"{cell:>19}" for cell in cells)


def _part(seconds: float, step_s: float) -> str:
    return f"{_ms(seconds)} {formats.percent(seconds / step_s if step_s else None):>6}"


def _rank_lines(profile: RankProfile, operators: int) -> Iterator[str]:
    what = "kernels" if profile.on_device else "operators, by themselves"
    memory = formats.size(profile.peak_bytes) if profile.peak_bytes else "n/a"
    facts = [f"memory {memory}"]
    if profile.on_device:
        facts.append(
            f"{profile.kernels:.0f} kernels a step, {profile.tiny_kernels:.0f} of them tiny"
        )
    yield f"Rank {profile.rank}: {what} ({', '.join(facts)})"
    for each in profile.top[:operators]:
        share = formats.percent(each.share)
        yield f"{_ms(each.seconds):>12} {share:>6} {each.calls:>8.1f} x  {_name(each)}"


def _name(each: NamedTime) -> str:
    return clean_line(each.name, _NAME)


def _ms(seconds: float) -> str:
    return f"{formats.significant(seconds * 1e3)} ms"
