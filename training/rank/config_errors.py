"""What is wrong with a configuration, in one sentence, from what importing or jsonargparse
raised."""

from __future__ import annotations

import re


class ConfigError(ValueError):
    """A mistake in a run's configuration: where it is, what is wrong, what to do."""

    def __init__(self, *, where: str, what: str, remedy: str | None = None) -> None:
        self.where, self.what, self.remedy = where, what, remedy
        super().__init__(f"{where}: {what}" + (f" {remedy}" if remedy else ""))

    def to_document(self) -> dict[str, str | None]:
        return {"where": self.where, "what": self.what, "remedy": self.remedy}


_DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "yaml": "pyyaml",
}
_KEY = re.compile(r"""Parser key ['"]([\w.]+)['"]:\s*""")
_CLASS = re.compile(
    r"- Problem with given class_path '([\w.]+)': (.*?)(?= - Expected a <class 'NoneType'>|$)"
)
_TYPE = re.compile(r"<class '(?:[\w.]+\.)?(\w+)'>")


def to_config_error(error: BaseException) -> ConfigError:
    """The root cause of ``error`` as a ``ConfigError``."""
    for cause in _causes(error):
        if isinstance(cause, ConfigError):
            return cause
        if isinstance(cause, ModuleNotFoundError):
            return _missing(cause)
    text = re.sub(r"\s+", " ", str(error)).strip() or type(error).__name__
    if missing := re.search(r"No module named '([\w.]+)'", text):
        return _missing(ModuleNotFoundError(name=missing.group(1)))
    return _of_jsonargparse(text, type(error).__name__)


def _of_jsonargparse(text: str, kind: str) -> ConfigError:
    """Its messages name the key first, and bury the reason where a class path is to blame."""
    key = _KEY.search(text)
    where = key.group(1) if key else "configuration"
    if blamed := _CLASS.search(text):
        path, reason = blamed.groups()
        inner = _KEY.match(reason)
        if inner:
            where = f"{where}.init_args.{inner.group(1)}"
            reason = reason[inner.end() :]
        else:
            where, reason = f"{where}.class_path", f"{path}: {reason}"
    else:
        reason = text[key.end() :] if key else text
    return ConfigError(where=where, what=_short(_TYPE.sub(r"\1", reason), kind))


def _missing(error: ModuleNotFoundError) -> ConfigError:
    name = error.name or str(error)
    root = name.partition(".")[0]
    return ConfigError(
        where="configuration",
        what=f"the module {name!r} can't be imported.",
        remedy=(
            "Install it in the interpreter of the run "
            f"(pip install {_DISTRIBUTIONS.get(root, root)}), "
            "or put its file beside the configuration file."
        ),
    )


def _causes(error: BaseException) -> list[BaseException]:
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _short(text: str, kind: str, limit: int = 600) -> str:
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text if text.endswith((".", "…")) else f"{text}." if " " in text else f"{kind}: {text}."
