#!/usr/bin/env python3
"""Runs an example that starts its own processes twice: as on two machines with one process each, and as on one machine with two
processes. Both runs must print the same.

    two_machines.py PROGRAM [ARGUMENTS...]
"""
import os
import random
import socket
import subprocess
import sys


def free_port():
    """Returns a free port whose successor is free too. Both are below the ports that Linux gives to outgoing connections."""
    while True:
        port = random.randrange(20_000, 32_767)
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            pass


def start(*flags, **variables):
    return subprocess.Popen([*sys.argv[1:], *flags], stdout=subprocess.PIPE, text=True, env={**os.environ, **variables})


def results(*programs):
    """Returns what the programs print; ends this program if one of them fails."""
    try:
        outputs = [program.communicate(timeout=240)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()  # without effect on one that has ended
    codes = [program.returncode for program in programs]
    if any(codes):
        sys.exit(f"exit codes {codes}:\n" + "\n".join(outputs))
    return outputs


master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
second, first = results(start("-n", "2", "-g", "1", "-nr", "1", **master), start("-n", "2", "-g", "1", "-nr", "0", **master))
alone, = results(start("-n", "1", "-g", "2"))
print(first)
if second or "on 2 processes" not in first or first != alone:
    sys.exit(f"expected results of machine 0 only, and the same on one machine, got\n{second}\nand\n{alone}")
