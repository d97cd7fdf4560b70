"""What a profile shows: the ranks side by side, and one sentence with a remedy. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from msgspec import Struct

from ltui.training.diagnosis.trace_times import NamedTime, RankProfile

LEAST_DIFFERENCE = 0.2
"""Fraction of a step by which a rank must work longer than another one to be called slow."""
_OTHER_RANK = (
    "It may be the wait for a slower rank that was not profiled: see `ltui diagnose RUN` and"
    " `ltui profile RUN --ranks slowest,median`. If there is none: "
)
CHANGED_SHARE = 0.1
"""Change of the step time from which on a slower training is reported."""


class ProfileState(str, Enum):
    """How far a profile is."""

    WAITING = "waiting"
    """The ranks have not reached the steps, or have not written their traces."""
    SUMMARISING = "summarising"
    DONE = "done"
    FAILED = "failed"


class Difference(Struct, frozen=True, kw_only=True):
    """What the slowest profiled rank does longer than another one, in an average step."""

    slow: int
    other: int
    seconds: float
    """Difference of the time that is not spent in communication."""
    parts: tuple[NamedTime, ...]
    """Largest differences: parts of the step, then operators. ``share`` is of the step."""


class Profile(Struct, frozen=True, kw_only=True):
    """One profile of a run, as it is stored."""

    number: int
    attempt: int
    state: ProfileState
    ranks: tuple[int, ...]
    first: int
    """The first step that is measured."""
    last: int
    memory: bool = False
    requested_at: float = 0.0
    """Unix time."""
    request_id: str = ""
    """Chosen by who requested it, who may have got no answer."""
    rank_count: int = 0
    """Number of ranks of the run."""
    reason: str | None = None
    """Why it failed."""
    profiles: tuple[RankProfile, ...] = ()
    difference: Difference | None = None
    sentence: str | None = None
    remedy: str | None = None
    step_s_before: float | None = None
    """Median time of the slowest rank's steps before the profile."""
    step_s_after: float | None = None
    folder: str = ""
    """Where the traces are."""

    @property
    def is_over(self) -> bool:
        """True if it is done or has failed."""
        return self.state in (ProfileState.DONE, ProfileState.FAILED)

    @property
    def progress(self) -> str:
        """The state in words."""
        if self.state is ProfileState.WAITING:
            ranks = ", ".join(map(str, self.ranks))
            plural = "s" if len(self.ranks) > 1 else ""
            return f"rank{plural} {ranks}: profiles steps {self.first} to {self.last}"
        words = {
            ProfileState.SUMMARISING: "reads the traces",
            ProfileState.DONE: self.sentence or "done",
            ProfileState.FAILED: f"no profile: {self.reason}",
        }
        return words[self.state]


def own_s(profile: RankProfile) -> float:
    """Return the seconds of a step in which a rank does not communicate."""
    return profile.split.step_s - profile.split.exposed_s


def find_difference(profiles: Sequence[RankProfile]) -> Difference | None:
    """Return what makes one rank slower; None if no profiled rank works clearly longer."""
    if len(profiles) < 2:
        return None
    slow, other = max(profiles, key=own_s), min(profiles, key=own_s)
    step_s, seconds = slow.split.step_s, own_s(slow) - own_s(other)
    if step_s <= 0 or seconds < LEAST_DIFFERENCE * step_s:
        return None
    parts = [
        ("waiting for data", slow.split.data_s - other.split.data_s),
        ("host, between operators", slow.split.host_s - other.split.host_s),
        ("copies", slow.split.copies_s - other.split.copies_s),
        ("computing", slow.split.computing_s - other.split.computing_s),
    ]
    usual = {each.name: each.seconds for each in other.top}
    operators = [(each.name, each.seconds - usual.get(each.name, 0.0)) for each in slow.top]
    largest = [
        NamedTime(name=name, seconds=s, share=s / step_s, calls=0.0)
        for names in (parts, operators)
        for name, s in sorted(names, key=lambda pair: -pair[1])[:3]
        if s > 0.02 * step_s
    ]
    return Difference(slow=slow.rank, other=other.rank, seconds=seconds, parts=tuple(largest))


def explain(profiles: Sequence[RankProfile], rank_count: int = 0) -> tuple[str, str]:
    """Return what takes the time, and what to do about it. ``rank_count``: ranks of the run."""
    if (difference := find_difference(profiles)) is not None:
        return _explain_rank(difference)
    profile = max(profiles, key=own_s)
    split, step_s = profile.split, profile.split.step_s or 1.0
    where = f"rank {profile.rank}" if len(profiles) > 1 else "the rank"
    parts = (
        (
            split.data_s,
            "waits {} for data",
            "Give the DataLoader more workers, or make its samples cheaper; `ltui bench data`"
            " measures a preset's loader.",
        ),
        (
            split.host_s,
            "spends {} in Python, outside of operators",
            "Try torch.compile, a larger batch, and no .item(), print or other synchronisation in"
            " the loop.",
        ),
        (
            split.copies_s,
            "spends {} in copies",
            "Use pin_memory=True with non_blocking=True, and keep tensors on the device.",
        ),
        (
            split.exposed_s,
            "waits {} in communication that nothing overlaps",
            f"{_OTHER_RANK if len(profiles) < rank_count else ''}"
            "Use a larger batch or accumulate gradients, larger buckets (bucket_cap_mb), or a"
            " smaller data type for the gradients.",
        ),
        (split.computing_s, "computes {}", _remedy_for_computing(profile)),
    )
    seconds, text, remedy = max(parts, key=lambda part: part[0])
    amount = f"{seconds * 1e3:.3g} ms of a step of {step_s * 1e3:.3g} ms"
    return f"{where} {text.format(amount)}.", remedy


def _explain_rank(difference: Difference) -> tuple[str, str]:
    slow, other = difference.slow, difference.other
    text = f"rank {slow} works {difference.seconds * 1e3:.3g} ms longer in each step than rank"
    text += f" {other}, and the others wait for it"
    if not difference.parts:
        return f"{text}.", "Compare the traces of both ranks in Perfetto."
    first = difference.parts[0]
    remedies = {
        "waiting for data": "Look at the storage and the loader's workers of that rank.",
        "host, between operators": "Look for work that only that rank does (logging, saving,"
        " sleeping), and for other processes on its cores.",
        "copies": "Look at where that rank's tensors are.",
    }
    remedy = remedies.get(
        first.name, "Look for larger batches or a slower or shared processor at that rank."
    )
    return f"{text}: {first.seconds * 1e3:.3g} ms more of {first.name}.", remedy


def _remedy_for_computing(profile: RankProfile) -> str:
    if profile.tiny_kernels > 0.5 * profile.kernels:
        return (
            f"{profile.tiny_kernels:.0f} of {profile.kernels:.0f} kernels are tiny: try"
            " torch.compile or a larger batch."
        )
    if not profile.top:
        return "Open the trace in Perfetto."
    first = profile.top[0]
    return (
        f"{first.name} takes the most ({100 * first.share:.0f} % of the step). What may help, if it"
        " is not in use yet: torch.compile, a smaller data type (bf16), a smaller model."
    )


def change_text(profile: Profile) -> str | None:
    """Return how the step time before and after the profile compare; None if that is unknown."""
    before, after = profile.step_s_before, profile.step_s_after
    if not before or after is None:
        return None
    text = f"step time before {before * 1e3:.3g} ms, after {after * 1e3:.3g} ms"
    if after > (1 + CHANGED_SHARE) * before:
        text += ": slower since the profile"
    return text
