"""Addresses of nodes: ``HOST:PORT`` texts, host names, and the own address that others reach.

Standard library only. No function sends a packet except those that ask the name service.

The file of a run directory that says where the head listens: on node 0 and on every other node.
Node 0 binds the same port again after a restart of its supervisor, because the agents look for it
there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import ipaddress
import os
import re
import socket
import struct
from pathlib import Path
from typing import NamedTuple

from ltui.training.problem import ProblemError
from ltui.training.process.identity import boot_id
from ltui.training.store.run_directory import RunDir, read_json, write_json


class LinkPlace(NamedTuple):
    """Where the head of a run listens for its agents."""

    address: str
    """Host name or numeric address."""
    port: int


def link_place_path(run_dir: RunDir) -> Path:
    """Return the path of the file."""
    return run_dir.path / "engine" / "link.json"


def write_link_place(run_dir: RunDir, place: LinkPlace) -> None:
    """Write the file. Raises ``OSError``."""
    write_json(link_place_path(run_dir), place._asdict())


def read_link_place(run_dir: RunDir) -> LinkPlace | None:
    """Return the content of the file; None if there is none."""
    document = read_json(link_place_path(run_dir)) or {}
    address, port = document.get("address"), document.get("port")
    if not isinstance(address, str) or not isinstance(port, int):
        return None
    return LinkPlace(address, port)


def machine_id(home: Path) -> str:
    """Return a text that is the same for all processes of this machine that use ``home``.

    Containers on one machine, and network namespaces, count as machines of their own.
    """
    try:
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    facts = (boot_id() or "", network, socket.gethostname(), os.path.realpath(home))
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]


_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[^\]]+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d{1,5})")
_SIOCGIFADDR = 0x8915
"""Request of Linux for the address of an interface."""
_MAX_ADDRESSES = 4
"""Maximum number of addresses of one host name that are used."""
# Addresses for documentation: a route to them is the default route.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")


def parse_host_and_port(text: str, where: str) -> tuple[str, int]:
    """Parse ``HOST:PORT``; an IPv6 address stands in brackets. Raise ``ProblemError``."""
    match = _HOST_AND_PORT.fullmatch(text.strip())
    if match is None or not 0 < int(match["port"]) < 65536:
        raise ProblemError.of(
            where=where,
            what=f"{text!r} is not HOST:PORT.",
            remedy="Write it as node 0 prints it: 10.0.0.5:29501, node-1:29501 or [fd00::5]:29501.",
        )
    return match["v6"] or match["host"], int(match["port"])


def format_host_and_port(host: str, port: int) -> str:
    """Return ``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolve(host: str, where: str) -> list[str]:
    """Return the numeric addresses of a host, at most four. Raise ``ProblemError``."""
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ProblemError.of(
            where=where,
            what=f"the host {host!r} has no address here ({reason}).",
            remedy="Check its name, or give its IP address.",
        ) from error
    return list(dict.fromkeys(str(entry[4][0]) for entry in entries))[:_MAX_ADDRESSES]


def local_address_towards(address: str) -> str | None:
    """Return the address that this machine sends from to a numeric address; None without a route.

    An agent binds its probe socket to the one that it reaches the head from.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unsent:
        unsent.connect((address, 9))  # a datagram socket sends nothing when it connects
        return str(unsent.getsockname()[0])
    return None


def reachable_address() -> str | None:
    """Return the address at which other machines most likely reach this one.

    This is the source address of the default route, or else an address of the host name, or else
    one of a network interface. None if there are only loopback addresses.
    """
    candidates = [local_address_towards(elsewhere) for elsewhere in _ELSEWHERE]
    with contextlib.suppress(ProblemError):
        candidates += resolve(socket.gethostname(), "")
    candidates += interface_addresses()
    return next((c for c in candidates if c is not None and is_reachable_by_others(c)), None)


def interface_addresses() -> list[str]:
    """Return the addresses of the network interfaces, those of IPv4 first."""
    addresses = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as unsent:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(unsent.fileno(), _SIOCGIFADDR, request)
                addresses.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError, ValueError), open("/proc/net/if_inet6") as table:
        addresses += [
            socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in table
        ]
    return addresses


def is_reachable_by_others(address: str) -> bool:
    """Return False for a loopback, link-local or unspecified address."""
    try:
        value = ipaddress.ip_address(address)
    except ValueError:
        return False
    return not (value.is_loopback or value.is_link_local or value.is_unspecified)
