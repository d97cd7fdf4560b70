"""Facts about runs: what they are, where they live, how they are launched and watched.

Never imports textual, rich, ``ltui.app`` or ``ltui.widgets``. torch may be imported only below
``rank/``, ``models/`` and ``data/``, and in ``queue_writer.py`` of ``tensor_queue/``.
"""
