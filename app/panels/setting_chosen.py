"""The message by which a panel has a choice of the user remembered."""

from __future__ import annotations

from typing import Any

from textual.message import Message


class SettingChosen(Message):
    """The user changed a setting of ``user_config.SETTINGS``; None stands for its default."""

    def __init__(self, setting: str, value: Any) -> None:
        super().__init__()
        self.setting, self.value = setting, value
