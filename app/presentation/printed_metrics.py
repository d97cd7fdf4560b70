"""What a program prints that ltui could read, for a run that shows no metric. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from ltui.training.state.metric_name_patterns import GOALS
from ltui.widgets.sanitise import clean_name
from ltui.widgets.view_models import LogLine

_FORMS = ("json", "pairs")
_LINES = 2
"""Lines that must have values before a pattern is proposed: one may be a coincidence."""


def pattern_hint(lines: Iterable[LogLine]) -> str:
    """Return how the metrics of a program can be seen, by the first pattern that fits its lines."""
    # Imported here: most programs log their metrics.
    from ltui.training.rank.program.printed_values import metric_pattern

    texts = [line.text for line in lines]
    for form in _FORMS:
        find = metric_pattern(form)
        found = [values for text in texts if (values := _goals(find(text)))]
        if len(found) >= _LINES:
            name, value = next(iter(found[-1].items()))
            example = f"{clean_name(name, 30)} {value:g}"
            return f"It prints {example}: ltui exec --metrics-pattern {form} -- ... shows it."
    return "ltui_rank.log(loss=loss) in the program shows its values."


def _goals(values: dict[str, float]) -> dict[str, float]:
    return {n: v for n, v in values.items() if any(goal.search(n) for goal in GOALS)}
