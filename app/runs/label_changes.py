"""Change the labels of runs, say in a sentence what changed, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ltui.training.problem import ProblemError
from ltui.training.state.run_labels import RunLabels
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import RunDir
from ltui.widgets.sanitise import clean_line, clean_name

MAX_NAMES = 3
"""Number of runs that are named for one reason; the others are counted."""


class Outcome(Struct, frozen=True):
    """The result of one action on several runs."""

    done: tuple[str, ...]
    """Ids of the runs for which it worked."""
    failed: tuple[tuple[str, str], ...]
    """Id and reason of each of the other runs."""

    def sentence(self, text: str) -> str:
        """Return what happened. ``text`` has ``{}`` in place of the runs, as ``Deleted {}``."""
        count = len(self.done) + len(self.failed)
        if not self.failed:
            return f"{text.replace('{}', counted(self.done))}."
        runs = f"{len(self.done) or 'none'} of {count} runs" if count > 1 else "nothing"
        return f"{text.replace('{}', runs)}: {'; '.join(_reasons(self.failed))}."


def counted(run_ids: Sequence[str]) -> str:
    """Return the name of a single run, else the number of runs."""
    return clean_name(run_ids[0]) if len(run_ids) == 1 else f"{len(run_ids)} runs"


def for_each(runs: Sequence[RunDir], action: Callable[[RunDir], object]) -> Outcome:
    """Carry out an action on each run, also after it failed for another one."""
    done: list[str] = []
    failed: list[tuple[str, str]] = []
    for run in runs:
        try:
            action(run)
        except ProblemError as error:
            failed.append((run.id, error.problems[0].what))
        except Exception as error:  # noqa: BLE001 - one run must not keep the action from others
            failed.append((run.id, f"{type(error).__name__}: {error}"))
        else:
            done.append(run.id)
    return Outcome(tuple(done), tuple(failed))


def _reasons(failed: Sequence[tuple[str, str]]) -> list[str]:
    """Return for each reason the runs that have it."""
    runs: dict[str, list[str]] = {}
    for run_id, reason in failed:
        runs.setdefault(clean_line(reason).rstrip("."), []).append(clean_name(run_id))
    return [f"not {_named(names)} ({reason})" for reason, names in runs.items()]


def _named(names: Sequence[str]) -> str:
    if len(names) <= MAX_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES} others"


Change = Callable[[RunLabels], RunLabels]
"""Returns the new labels of a run."""
FIELDS = {"name": "name", "group": "group", "note": "note"}
"""Labels of one text, with their names in sentences."""


class LabelChange(Struct, frozen=True):
    """The labels of one run before and after an action."""

    run_dir: RunDir
    before: RunLabels
    after: RunLabels

    def undone(self, now: RunLabels) -> RunLabels:
        """Return ``now`` without this change. What somebody else has changed since is kept."""
        added, removed = self._tags()
        back = replace(now, tags=tuple(sorted((set(now.tags) - added) | removed)))
        for name in (*FIELDS, "star"):
            if getattr(now, name) == getattr(self.after, name):
                back = replace(back, **{name: getattr(self.before, name)})
        return back

    def _tags(self) -> tuple[set[str], set[str]]:
        """Return the added and the removed tags."""
        before, after = set(self.before.tags), set(self.after.tags)
        return after - before, before - after

    def parts(self) -> list[tuple[str, str]]:
        """Return what happened to each label as text for one run and for several, with ``{}`` in
        place of the runs."""
        added, removed = self._tags()
        parts = []
        if added:
            parts.append((f"added {', '.join(sorted(added))} to {{}}",) * 2)
        if removed:
            parts.append((f"removed {', '.join(sorted(removed))} from {{}}",) * 2)
        for name, noun in FIELDS.items():
            before, after = getattr(self.before, name), getattr(self.after, name)
            if after and before != after:
                parts.append((f"{'changed' if before else 'set'} the {noun} of {{}}",) * 2)
            elif before and not after:
                several = "took {} out of their groups" if name == "group" else "removed {} notes"
                parts.append((f"removed the {noun} of {{}}", several))
        if self.after.star != self.before.star:
            parts.append(("starred {}" if self.after.star else "removed the star of {}",) * 2)
        return parts


def change_several(run_dirs: Sequence[RunDir], change: Change) -> tuple[Outcome, list[LabelChange]]:
    """Change the labels of runs. Return how it went, and what has changed."""
    changes: list[LabelChange] = []

    def change_one(run_dir: RunDir) -> None:
        seen: list[RunLabels] = []

        def changed(labels: RunLabels) -> RunLabels:
            seen.append(labels)
            return change(labels)

        after = change_labels(run_dir, changed)
        if after != seen[0]:
            changes.append(LabelChange(run_dir, seen[0], after))

    return for_each(run_dirs, change_one), changes


def undo(changes: Sequence[LabelChange]) -> Outcome:
    """Take back what an action has changed."""
    by_id = {change.run_dir.id: change for change in changes}
    return for_each(
        [change.run_dir for change in changes],
        lambda run_dir: change_labels(run_dir, by_id[run_dir.id].undone),
    )


def what_changed(changes: Sequence[LabelChange]) -> str:
    """Return what an action has done, as ``removed 2 notes``."""
    runs: dict[tuple[str, str], list[str]] = {}
    for change in changes:
        for part in change.parts():
            runs.setdefault(part, []).append(change.run_dir.id)
    texts = []
    for (one, several), ids in runs.items():
        text, them = (one, counted(ids)) if len(ids) == 1 else (several, counted(ids))
        texts.append(text.replace("{} notes", f"{len(ids)} notes").replace("{}", them))
    return ", ".join(texts) or "changed nothing"
