#!/usr/bin/env python3
"""Several hosts on one machine: network namespaces, each with its own link to a switch. Needs root, and iproute2.

    with Hosts(3, rate="1gbit") as hosts:
        program = hosts[0].start(["semitone", "launch", ...])

    sudo tools/hosts.py --rate 1gbit -- COMMAND...   runs COMMAND on two hosts at once; {rank}, {count} and {master} in it
                                                  become the host's number, how many there are, and host 0's address

The machine's own network is not touched: the switch is a bridge in a namespace, too. Everything that runs on the hosts is
killed, and the hosts are gone, when the `with` ends, however it does; what a killed run of this left is removed by the next.
"""
import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

PREFIX = "semitone-hosts"


def ip(*arguments, check=True):
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if check and done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


def own_files(namespace):
    """What `ip netns exec` shows in the place of files of /etc."""
    return pathlib.Path("/etc/netns") / namespace


def processes_in(namespace):
    return [int(word) for word in ip("netns", "pids", namespace, check=False).split()]


def remove(namespace):
    """Kills its processes, also stopped ones, and removes it with its links."""
    deadline = time.monotonic() + 10
    while (ids := processes_in(namespace)) and time.monotonic() < deadline:
        for number in ids:
            try:
                os.kill(number, signal.SIGKILL)
            except ProcessLookupError:
                pass
        time.sleep(0.05)
    ip("netns", "del", namespace, check=False)
    shutil.rmtree(own_files(namespace), ignore_errors=True)


def remove_leftovers():
    """The namespaces of earlier runs that have ended; their names contain the process numbers."""
    for name in re.findall(rf"^{PREFIX}-\d+-\w+", ip("netns", "list"), re.M):
        if not os.path.exists(f"/proc/{name.split('-')[2]}"):
            remove(name)


class Host:
    def __init__(self, namespace, address):
        self.namespace = namespace
        self.address = address

    def start(self, command, **options):
        """A subprocess.Popen of a command on this host."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *map(str, command)], **options)

    def processes(self):
        """The numbers of all processes on this host."""
        return processes_in(self.namespace)

    def ip(self, *arguments):
        return ip("-n", self.namespace, *arguments)

    def know(self, name, address):
        """From now on this host resolves a name, if it has names of its own."""
        with open(own_files(self.namespace) / "hosts", "a") as hosts:
            hosts.write(f"{address} {name}\n")

    def unplug(self):
        self.ip("link", "set", "eth0", "down")

    def plug(self):
        self.ip("link", "set", "eth0", "up")


class Hosts:
    """`rate`: limit of each link in each direction, in tc's syntax ("1gbit"); None: no limit. `own_names`: no host knows any
    name but localhost and those that Host.know() tells it."""

    def __init__(self, count, rate=None, own_names=False):
        self._count = count
        self._rate = rate
        self._own_names = own_names
        self._switch = f"{PREFIX}-{os.getpid()}-switch"
        self._hosts = [Host(f"{PREFIX}-{os.getpid()}-{n}", f"10.77.0.{n + 1}") for n in range(count)]

    def __enter__(self):
        if os.geteuid() != 0:
            raise PermissionError("making hosts needs root")
        remove_leftovers()
        # Ctrl-C ends a `with` as an exception does; make these signals do the same.
        self._handlers = {number: signal.signal(number, lambda *_: sys.exit(1)) for number in (signal.SIGTERM, signal.SIGHUP)}
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self._hosts

    def __exit__(self, *_):
        self._remove()

    def _make(self):
        ip("netns", "add", self._switch)
        ip("-n", self._switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", self._switch, "link", "set", "bridge", "up")
        for number, host in enumerate(self._hosts):
            port = f"port{number}"
            ip("netns", "add", host.namespace)
            ip("-n", self._switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            ip("-n", self._switch, "link", "set", port, "master", "bridge", "up")
            if self._own_names:
                own_files(host.namespace).mkdir(parents=True)
                host.know("localhost", "127.0.0.1")
                (own_files(host.namespace) / "nsswitch.conf").write_text("hosts: files\n")
            host.ip("address", "add", f"{host.address}/24", "dev", "eth0")
            host.ip("link", "set", "lo", "up")
            host.ip("link", "set", "eth0", "up")
            if self._rate is not None:
                # Both ends: what the host sends, and what it gets. A bucket of 1 ms at 1 Gbit/s.
                self._limit(host.namespace, "eth0")
                self._limit(self._switch, port)

    def _limit(self, namespace, device):
        done = subprocess.run(["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", "rate", self._rate, "burst", "128kb",
                               "latency", "50ms"], capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"tc: {done.stderr.strip()}")

    def _remove(self):
        for host in self._hosts:
            remove(host.namespace)
        remove(self._switch)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


def main():
    parser = argparse.ArgumentParser(description="Runs a command on several hosts at once, which are made for it.")
    parser.add_argument("--count", type=int, default=2)
    parser.add_argument("--rate", help="rate of each link: 1gbit, 100mbit; default: no limit")
    parser.add_argument("command", nargs="+", metavar="COMMAND")
    options = parser.parse_args()
    with Hosts(options.count, options.rate) as hosts:
        def on(number):
            words = {"{rank}": str(number), "{count}": str(options.count), "{master}": hosts[0].address}
            return [re.sub("|".join(map(re.escape, words)), lambda m: words[m.group()], word) for word in options.command]
        running = [host.start(on(number)) for number, host in enumerate(hosts)]
        return max(abs(program.wait()) for program in running)


if __name__ == "__main__":
    sys.exit(main())
