"""How important each parameter of a sweep is, in a process of its own that reads the record.

Optuna loads scikit-learn for it, which takes seconds and changes the environment of the process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

from ltui.training.json_codec import from_json, parse_json, to_json
from ltui.training.process.python_environment import module_command
from ltui.training.sweep.record import State, Sweep
from ltui.training.sweep.suggest import build_study, has_optuna

LEAST_TRIALS = 8
"""Number of finished combinations without which nothing is said."""
_TIMEOUT_S = 60.0


def importance(sweep: Sweep) -> tuple[dict[str, float], str]:
    """Return the importance of each key, whose sum is 1, or why there is none.

    It is that of PED-ANOVA: Watanabe et al., "PED-ANOVA: Efficiently Quantifying Hyperparameter
    Importance in Arbitrary Subspaces" (IJCAI 2023), which needs no other package.
    """
    if not has_optuna():
        return {}, "optuna is not installed"
    if len({t.suggestion for t in sweep.told if t.state == State.FINISHED}) < LEAST_TRIALS:
        return {}, f"fewer than {LEAST_TRIALS} combinations have finished"
    try:
        done = subprocess.run(
            module_command("ltui.training.sweep.importance"),
            input=json.dumps(to_json(sweep)),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        return {str(key): float(value) for key, value in json.loads(done.stdout).items()}, ""
    except subprocess.CalledProcessError as error:
        return {}, str(error.stderr).strip().rpartition("\n")[2]
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return {}, str(error)


def main() -> None:
    """Print the importance of each key as JSON."""
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    warnings.simplefilter("ignore")  # Some arguments are experimental in older releases.
    study = build_study(from_json(Sweep, parse_json(sys.stdin.read())))
    print(json.dumps(get_param_importances(study, evaluator=PedAnovaImportanceEvaluator())))


if __name__ == "__main__":
    main()
