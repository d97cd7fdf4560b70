"""(being written)"""

from textual.screen import Screen


class HomeScreen(Screen[None]):
    def __init__(self, home, *, readonly=False, python=None):
        super().__init__()
