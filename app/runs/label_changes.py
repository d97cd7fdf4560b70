"""Change the labels of runs, say in a sentence what changed, and undo it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ltui.app.runs.several_runs import Outcome, counted, for_each
from ltui.training.state.run_labels import RunLabels
from ltui.training.store.labels_file import change_labels
from ltui.training.store.run_directory import RunDir

Change = Callable[[RunLabels], RunLabels]
"""Returns the new labels of a run."""
FIELDS = {"name": "name", "group": "group", "note": "note"}
"""Labels of one text, with their names in sentences."""


@dataclass(frozen=True, slots=True)
class LabelChange:
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
