"""The keys of the run screen, and the hints that its footer shows for the widget in focus.

``CHART_KEYS`` are the same on every screen with linked charts.
"""

from __future__ import annotations

from textual.widget import Widget
from textual.widgets import Input

from ltui.app.keys.footer import FIELD_HELP_HINT, KeyHint
from ltui.app.presentation.notifications import CONTROLS, refusal
from ltui.training.config.run_spec import BLOCKING_LEVELS
from ltui.training.state.run_snapshot import LIVE, RunSnapshot, RunState
from ltui.widgets.charts.chart import Chart
from ltui.widgets.log_view import LogLines
from ltui.widgets.run_tables import GpuTable, RankTable

CHART_KEYS = """
x      | axis                | x axis           | Steps, epochs, time, time of day or samples
y      | log_scale           | y scale          | Switch between a linear and a logarithmic y axis
o      | outliers            | outliers         | Show all values, or cut outliers off the y axis
+,=    | smooth(1)           | more smoothing   | Smooth the curves more
-      | smooth(-1)          | less smoothing   | Smooth the curves less
"""
CHART_HINTS = (
    KeyHint("↑↓", "zoom", "focused.zoom(1)"),
    KeyHint("←→", "crosshair", "focused.move(1)"),
    KeyHint("shift+←→", "pan", "focused.pan(1)"),
    KeyHint("home", "show all", "focused.show_all"),
    KeyHint(", .", "marks", "focused.mark(1)"),
)
"""Hints while a chart has the focus."""
SCALE_HINTS = (
    KeyHint("x", "x axis", "screen.axis"),
    KeyHint("y", "y scale", "screen.log_scale"),
    KeyHint("+-", "smoothing", "screen.smooth(1)"),
)
"""Hints for all charts of a screen."""


KEYS = f"""
[Run]
s      | stop                | stop             | Stop after the current step; asks first
S      | stop_when           | schedule stop    | Stop at a step, epoch, metric value or time
p      | pause               | pause            | Pause, or continue a paused run
c      | checkpoint          | checkpoint       | Save a checkpoint and keep running
k      | kill                | kill             | Kill every process of the run, after a question
r      | resume              | resume           | Resume from a checkpoint, with changes if wanted
R      | rerun               | run again        | Start a new run with the settings of this one
d      | diagnose            | diagnose         | Show what is wrong and what each rank does
P      | profile             | profile          | Profile some steps: what takes the time
[Charts]
m      | choose_metrics      | choose metrics   | Choose the metrics of panel 1 or 2
M      | all_metrics         | all metrics      | Show every metric as a chart
{CHART_KEYS.strip()}
[Log]
v      | next_log            | choose rank      | Show all ranks, one rank, or the launcher
/      | search              | find             | Find in the log; among machines: filter ranks
[Past]
comma     | past_mark(-1) | earlier mark | The run at the mark before: checkpoint, stall, attempt
full_stop | past_mark(1)  | later mark   | The run at the next mark
b         | ask_moment    | moment       | The run at a moment: 03:12, -12m, step 4000
space     | play          | play         | In the past: play, faster with + and slower with -; hold
[Screen]
1      | panel('loss')       | metrics          | Go to the charts of metrics
2      | panel('throughput') | throughput       | Go to the throughput chart
3      | panel('gpus')       | GPUs             | Go to the GPUs
4      | panel('ranks')      | ranks            | Go to the ranks
5,l    | panel('log')        | log              | Go to the log
6      | panel('details')    | details          | Go to metrics, checkpoints, events and settings
z      | zoom                | maximise         | Maximise the panel with the focus, or restore all
]      | details             | details column   | Show or hide the details beside the panels
ctrl+up,(    | border(0,-1)  | lower charts    | Move the border below the charts up
ctrl+down,)  | border(0,1)   | higher charts   | Move the border below the charts down
ctrl+left,<  | border(-1,0)  | border left     | Move the border between two panels to the left
ctrl+right,> | border(1,0)   | border right    | Move it to the right; also the mouse
0      | reset               | reset layout     | Restore the layout, the zoom and the smoothing
escape | cancel              | cancel           | Restore a maximised panel; close an opened run
q      | back                | close            | Close this screen (training continues)
"""

METRIC_HINTS = (
    KeyHint("m", "metrics", "screen.choose_metrics"),
    KeyHint("M", "all metrics", "screen.all_metrics"),
)
"""Hints for the metrics of the charts, unless the log has the focus."""
LOG_HINTS = (
    KeyHint("/", "find", "screen.search"),
    KeyHint("v", "choose rank", "screen.next_log"),
    KeyHint("f", "follow", "focused.toggle('follow')"),
    KeyHint("L", "level", "focused.next_level"),
    KeyHint("w", "wrap", "focused.toggle('wrap')"),
)
"""Hints while the log has the focus."""
MACHINE_HINTS = (
    KeyHint("⏎", "unfold, log", "focused.select"),
    KeyHint("/", "filter", "screen.search"),
    KeyHint("u", "unfold all", "focused.fold_all"),
)
"""Hints while the table of machines has the focus."""
GPU_HINTS = (KeyHint("⏎", "all readings", "focused.select"),)
"""Hints while the table of GPUs has the focus."""
FILTER_HINTS = (
    KeyHint("⏎", "to the list", "screen.search", keep=True),
    KeyHint("esc", "clear the filter", "screen.cancel", keep=True),
    FIELD_HELP_HINT,
)
"""Hints while the filter of ranks has the focus."""
TYPING_HINTS = (
    KeyHint("⏎", "find", "screen.search", keep=True),
    KeyHint("esc", "close search", "screen.search", keep=True),
    FIELD_HELP_HINT,
)
"""Hints while a text field has the focus: it takes every letter, so no letter is a key then."""


def past_hints(*, plays: bool) -> list[KeyHint]:
    """Return the hints while a moment of the past is shown."""
    speed = (KeyHint("+-", "speed", "screen.smooth(1)"),)
    return [
        KeyHint("esc", "now", "screen.cancel", keep=True),
        KeyHint(", .", "marks", "screen.past_mark(-1)", keep=True),
        KeyHint("b", "moment", "screen.ask_moment", keep=True),
        KeyHint("space", "hold" if plays else "play", "screen.play", keep=True),
        *(speed if plays else ()),
        KeyHint("1-6", "panel", "screen.panel('loss')"),
        KeyHint("z", "maximise", "screen.zoom"),
        *(METRIC_HINTS if plays else (*METRIC_HINTS, *SCALE_HINTS)),
        KeyHint("?", "help", "app.help", keep=True),
        KeyHint("q", "close", "screen.back", keep=True),
    ]


def run_hints(
    snapshot: RunSnapshot, *, readonly: bool, focused: Widget | None = None
) -> list[KeyHint]:
    """Return the hints for what can be done now, with the keys of the panel that has the focus."""
    if isinstance(focused, Input):
        return list(FILTER_HINTS if focused.has_class("filter") else TYPING_HINTS)
    paused = snapshot.state in (RunState.PAUSED, RunState.PAUSING)
    leave = "close (training continues)" if snapshot.state in LIVE else "close"
    blocked = any(v.level in BLOCKING_LEVELS and v.ended is None for v in snapshot.verdicts)
    stuck = blocked and snapshot.state in LIVE
    diagnose = KeyHint("d", "diagnose", "screen.diagnose", keep=stuck)
    kill = KeyHint("k", "kill", "screen.kill", keep=stuck)
    in_log = isinstance(focused, LogLines)
    panel_hints: tuple[KeyHint, ...] = ()
    if isinstance(focused, Chart):
        panel_hints = CHART_HINTS[:-1]  # On this screen, its last keys show the past.
    elif in_log:
        panel_hints = LOG_HINTS
    elif isinstance(focused, RankTable) and snapshot.nodes:
        panel_hints = MACHINE_HINTS
    elif isinstance(focused, GpuTable):
        panel_hints = GPU_HINTS
    hints = [
        # The keys that help a stuck run come first.
        *([diagnose, kill] if stuck else []),
        KeyHint("s", "stop", "screen.stop"),
        KeyHint("p", "continue" if paused else "pause", "screen.pause"),
        KeyHint("c", "checkpoint", "screen.checkpoint"),
        *([] if stuck else [kill]),
        KeyHint("r", "resume", "screen.resume", keep=True),
        *([] if stuck else [diagnose]),
        *panel_hints,
        KeyHint("1-6", "panel", "screen.panel('loss')"),
        KeyHint("z", "maximise", "screen.zoom"),
        *([] if in_log else (*METRIC_HINTS, *SCALE_HINTS)),
        KeyHint(", .", "past", "screen.past_mark(-1)"),
        KeyHint("t", "theme", "app.choose_theme"),
        KeyHint("?", "help", "app.help", keep=True),
        KeyHint("q", leave, "screen.back", keep=True),
        KeyHint("R", "run again", "screen.rerun"),
        KeyHint("P", "profile", "screen.profile"),
    ]
    refused = {control for control in CONTROLS if refusal(snapshot, control, readonly=readonly)}
    return [hint for hint in hints if hint.action.removeprefix("screen.") not in refused]
