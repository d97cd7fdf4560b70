"""Describe an error in a configuration in one sentence, from an exception of its loading.

The exceptions are those of imports and of jsonargparse.
"""

from __future__ import annotations

import re


class ConfigError(ValueError):
    """An error in a run's configuration: where it is, what is wrong, and what to do."""

    def __init__(self, *, where: str, what: str, remedy: str | None = None) -> None:
        self.where, self.what, self.remedy = where, what, remedy
        super().__init__(f"{where}: {what}" + (f" {remedy}" if remedy else ""))

    def to_document(self) -> dict[str, str | None]:
        """Return the error as a JSON object."""
        return {"where": self.where, "what": self.what, "remedy": self.remedy}


_PIP_NAMES = {
    "sklearn": "scikit-learn",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "yaml": "pyyaml",
}
"""Module name to pip name, where they differ."""
_PARSER_KEY = re.compile(r"""Parser key ['"]([\w.]+)['"]:\s*""")
_CLASS_PATH_PROBLEM = re.compile(
    r"- Problem with given class_path '([\w.]+)': (.*?)(?= - Expected a <class 'NoneType'>|$)"
)
_TYPE_REPR = re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>")


def to_config_error(error: BaseException) -> ConfigError:
    """Return the root cause of ``error`` as a ``ConfigError``."""
    for cause in _causes(error):
        if isinstance(cause, ConfigError):
            return cause
        if isinstance(cause, ModuleNotFoundError):
            return _missing_module(cause)
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    if missing := re.search(r"No module named '([\w.]+)'", text):
        return _missing_module(ModuleNotFoundError(name=missing.group(1)))
    return _from_jsonargparse(text, type(error).__name__)


def _from_jsonargparse(text: str, kind: str) -> ConfigError:
    """Read key and reason from a message of jsonargparse.

    The message begins with the key. If a class path is the cause, the reason is nested inside.
    """
    key = _PARSER_KEY.search(text)
    where = key.group(1) if key else "configuration"
    if problem := _CLASS_PATH_PROBLEM.search(text):
        path, reason = problem.groups()
        inner = _PARSER_KEY.match(reason)
        if inner:
            where = f"{where}.init_args.{inner.group(1)}"
            reason = reason[inner.end() :]
        else:
            where, reason = f"{where}.class_path", f"{path}: {reason}"
    else:
        reason = text[key.end() :] if key else text
    return ConfigError(where=where, what=_shorten(_TYPE_REPR.sub(r"\1", reason), kind))


def _missing_module(error: ModuleNotFoundError) -> ConfigError:
    name = error.name or str(error)
    root = name.partition(".")[0]
    return ConfigError(
        where="configuration",
        what=f"the module {name!r} can't be imported.",
        remedy=(
            "Install it in the interpreter of the run "
            f"(pip install {_PIP_NAMES.get(root, root)}), "
            "or put its file into the folder of the configuration file."
        ),
    )


def _causes(error: BaseException) -> list[BaseException]:
    """Return ``error`` and the exceptions that caused it."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _shorten(text: str, kind: str, limit: int = 600) -> str:
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text if text.endswith((".", "…")) else f"{text}." if " " in text else f"{kind}: {text}."
