"""``ltui serve``: the dashboard in a browser."""

from __future__ import annotations

import asyncio
import errno
import secrets
import socket
from argparse import Namespace

from ltui.app.command_output import EXIT_DONE
from ltui.training.problem import ProblemError
from ltui.training.process.python_environment import load_library, module_command
from ltui.training.store.find_run import find_run
from ltui.training.store.run_directory import ltui_home

TOKEN_BYTES = 32
"""Random bytes of the token."""


def serve(options: Namespace) -> int:
    """Run ``ltui serve [RUN]`` until a signal ends it."""
    home = ltui_home(to_write=False)
    command = module_command("ltui.app.open_dashboard")
    command += ["--control"] if options.control else []
    if options.run is not None:
        command += ["--run", str(find_run(home, options.run).path)]
    for module in ("aiohttp", "textual_serve.server"):
        load_library(module, "serve", "ltui serve")
    # Imported here: the package is optional.
    from ltui.app.dashboard_server import DashboardServer

    token = secrets.token_urlsafe(TOKEN_BYTES)
    with _listen(options.host, options.port) as listener:
        asyncio.run(
            DashboardServer(command, token).run(
                listener, lambda: _print_address(listener, token, control=options.control)
            )
        )
    return EXIT_DONE


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on the loopback interface. Raise ``ProblemError``."""
    # Imported here, as above.
    from ltui.app.dashboard_server import is_loopback

    if not is_loopback(host):
        raise ProblemError.of(
            where=f"--host {host}",
            what="the dashboard is served only on addresses of the loopback interface.",
            remedy="Leave --host out. From another machine, use ssh -L "
            f"{port}:127.0.0.1:{port} and open the address there.",
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        in_use = error.errno == errno.EADDRINUSE
        raise ProblemError.of(
            where=f"--port {port}" if in_use else f"--host {host}",
            what="another program uses this port."
            if in_use
            else f"this address cannot be used ({error.strerror or error}).",
            remedy="Choose another port; --port 0 takes a free one." if in_use else None,
        ) from error


def _print_address(listener: socket.socket, token: str, *, control: bool) -> None:
    # Imported here, as above.
    from ltui.app.dashboard_server import TOKEN_PARAMETER

    host, port = listener.getsockname()[:2]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    what = "can start and stop runs" if control else "is read-only"
    print(f"The dashboard {what}. Ctrl-C ends it. Open this address, and keep it secret:")
    print(f"http://{place}/?{TOKEN_PARAMETER}={token}")
    print(f"From another machine: ssh -L {port}:{place} {socket.gethostname()}", flush=True)
