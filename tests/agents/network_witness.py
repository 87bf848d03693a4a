"""Who an agent in a sandbox tries to reach: proof inside the container's own network name space.

A sandbox of ours has nothing but `lo`, so an attempt leaves no trace: it fails before there is a packet. The
witness therefore makes every IPv4 address a local one (a `local` route to `lo`): attempts become packets, which it
reads, and questions to any name server come to it; it writes them down and answers that there is no such name.
Nothing can leave by that: `lo` is still all there is. (Containers without a network have no IPv6 at all.)

As a module it is the test's side; as a program, the one inside: `nsenter -t PID -n python3 network_witness.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

NXDOMAIN = 0x8183
"""Flags of the answer (RFC 1035, 4.1.1): response, recursion available, no such name."""
LOOPBACK = ("127.", "::1")
TCP, UDP, ICMP = 6, 17, 1
START_S = 30.0


class Witness:
    """``names``: what was asked of DNS. ``contacts``: ``tcp 192.0.2.1:443``, whatever was not loopback."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.contacts: set[str] = set()

    def told(self, line: bytes) -> None:
        for kind, value in json.loads(line).items():
            (self.names if kind == "name" else self.contacts).add(value)


def process_in(run_dir: Path, sandbox_id: str) -> int:
    """The helper of a local sandbox, by the record of its bubblewrap somewhere in ``run_dir``."""
    (record,) = run_dir.rglob(f"{sandbox_id}.pid")
    bwrap = int(record.read_text().split()[0])
    (helper,) = Path(f"/proc/{bwrap}/task/{bwrap}/children").read_text().split()
    return int(helper)


@contextlib.asynccontextmanager
async def witnessed(pid: int) -> AsyncIterator[Witness]:
    """Watches the network name space of process ``pid`` (of a sandbox), as root, while the block lasts."""
    root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    process = await asyncio.create_subprocess_exec(
        *(*root, "nsenter", "-t", str(pid), "-n", sys.executable, "-IS", __file__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    witness = Witness()

    async def read(lines: asyncio.StreamReader) -> None:
        async for line in lines:
            witness.told(line)

    reading: asyncio.Task[None] | None = None
    try:
        ready = await asyncio.wait_for(process.stdout.readline(), START_S)
        if not ready:
            raise RuntimeError(f"the witness in the name space of {pid} did not start: {await process.wait()}")
        reading = asyncio.create_task(read(process.stdout))
        yield witness
    finally:
        process.stdin.close()  # its sign to end
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), START_S)
        if process.returncode is None:
            process.kill()
            await process.wait()
        if reading is not None:
            await reading


# Inside.


def tell(**what: str) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def asked_name(question: bytes) -> str:
    """The name of a DNS message's first question (RFC 1035, 4.1.2)."""
    labels, at = [], 12
    while at < len(question) and question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode("ascii", "replace"))
        at += 1 + question[at]
    return ".".join(labels).lower()


def no_such_name(question: bytes) -> bytes:
    end = 12 + sum(len(label) + 1 for label in asked_name(question).split(".")) + 5
    return question[:2] + struct.pack("!5H", NXDOMAIN, 1, 0, 0, 0) + question[12:end]


def answer_names(family: socket.AddressFamily) -> None:
    server = socket.socket(family, socket.SOCK_DGRAM)
    if family is socket.AF_INET6:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    server.bind(("", 53))

    def serve() -> None:
        while True:
            question, sender = server.recvfrom(4096)
            if len(question) > 12:
                tell(name=asked_name(question))
                server.sendto(no_such_name(question), sender)

    threading.Thread(target=serve, daemon=True).start()


def parse(packet: bytes) -> tuple[int, str, str, int, int] | None:
    """Protocol, source, target, and their ports (0 where there are none), of an IP packet; None for others."""
    if len(packet) >= 20 and packet[0] >> 4 == 4:
        length, protocol = (packet[0] & 15) * 4, packet[9]
        source, target = (
            socket.inet_ntop(socket.AF_INET, packet[12:16]),
            socket.inet_ntop(socket.AF_INET, packet[16:20]),
        )
    elif len(packet) >= 40 and packet[0] >> 4 == 6:
        length, protocol = 40, packet[6]
        source, target = (
            socket.inet_ntop(socket.AF_INET6, packet[8:24]),
            socket.inet_ntop(socket.AF_INET6, packet[24:40]),
        )
    else:
        return None
    if protocol not in (TCP, UDP) or len(packet) < length + 4:
        return protocol, source, target, 0, 0
    ports: Any = struct.unpack_from("!HH", packet, length)
    return protocol, source, target, ports[0], ports[1]


def note_contacts() -> None:
    sniffer = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3))  # ETH_P_ALL
    sniffer.bind(("lo", 0))

    def serve() -> None:
        flows: set[tuple[int, str, str, int, int]] = set()
        while True:
            found = parse(sniffer.recv(65535))
            if found is None or found[2].startswith(LOOPBACK):
                continue
            protocol, source, target, port, to_port = found
            if (protocol, target, source, to_port, port) in flows:
                continue  # an answer
            if found not in flows and protocol in (TCP, UDP) and (protocol, to_port) != (UDP, 53):
                tell(contact=f"{'tcp' if protocol == TCP else 'udp'} {target}:{to_port}")
            flows.add(found)

    threading.Thread(target=serve, daemon=True).start()


def main() -> None:
    for family in ("-4", "-6"):
        everything = "0.0.0.0/0" if family == "-4" else "::/0"
        done = subprocess.run(
            ["ip", family, "route", "add", "local", everything, "dev", "lo"], capture_output=True, check=False
        )
        if done.returncode != 0 and family == "-4":
            raise SystemExit(done.stderr.decode())
    note_contacts()
    answer_names(socket.AF_INET)
    with contextlib.suppress(OSError):  # no IPv6 here
        answer_names(socket.AF_INET6)
    tell(name="")
    sys.stdin.buffer.read()


if __name__ == "__main__":
    main()
