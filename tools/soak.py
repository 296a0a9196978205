#!/usr/bin/env python3
"""Trains twice: undisturbed, and with processes that are killed with SIGKILL every minute. Both must end with the same weights.

    tools/soak.py [--minutes 30] [--every 60] [--program build/release/apps/semitone] [-- --opt-level O3 --dtype fp16]

Two processes train the ConvNet on MNIST at O2, or with the flags of `semitone train` after --. Victims are chosen at random:
one process of the training, both, or also the launcher, which is then started again. About a third of the time is for the
undisturbed training. Prints each kill. Exit code: 0 if the weights are equal byte for byte, 1 if not, or if the training failed,
left a process, or took twice as long as planned in all.
"""
import argparse
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PROCESSES = 2


def train(arguments, folder, steps, resume=True):
    """Starts a training of this number of steps, in two processes that are started again when one fails."""
    command = [str(arguments.program), "launch", "--nproc-per-node", str(PROCESSES), "--max-restarts", "1000",
               str(arguments.program), "train", "--model", "convnet", *arguments.flags, "--epochs", "1000",
               "--max-steps", str(steps), "--checkpoint-dir", str(folder / "checkpoints"), "--save-every", "50",
               "--save-weights", str(folder / "weights.safetensors")]
    if resume:
        command += ["--resume", "auto"]
    folder.mkdir(parents=True, exist_ok=True)
    log = open(folder / "log", "ab")
    return subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)


def finish(process, folder, deadline):
    try:
        code = process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired:
        fail_late(folder)
    if code != 0:
        fail(folder, f"expected the training to succeed, got exit code {code}")
    if left := processes_of(folder):
        fail(folder, f"expected no process after the training's end, got {left}")


def fail_late(folder):
    fail(folder, "expected the training to end in twice the planned time, it did not")


def fail(folder, message):
    tail = (folder / "log").read_text(errors="replace").splitlines()[-15:]
    sys.exit("\n".join([f"soak: {message}; its log {folder / 'log'} ends with:", *tail]))


def processes_of(folder):
    """Returns the processes of the training, without the launcher: [(id, rank)]."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().split(b"\0")
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        if command[1:2] == [b"train"] and os.fsencode(folder / "checkpoints") in command:
            found += [(int(entry.name), int(v[5:])) for v in environment if v.startswith(b"RANK=")]
    return found


def kill(launcher, folder, choice):
    """Kills, and returns what was killed as text; nothing if the training had no processes at that moment."""
    victims = [p for p in processes_of(folder) if choice.random() < 0.6]
    names = [f"rank {rank}" for _, rank in victims]
    for process, _ in victims:
        try:
            os.kill(process, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if choice.random() < 0.25 and launcher.poll() is None:
        launcher.kill()
        launcher.wait()
        names.append("the launcher")
    return " and ".join(names)


def end_all(folder):
    """Kills what runs in this folder, launchers first: they would start the processes again."""
    for name in (b"launch", b"train"):
        for entry in pathlib.Path("/proc").iterdir():
            try:
                command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            except OSError:  # it has ended
                continue
            if command.split(b"\0")[1:2] == [name] and os.fsencode(folder) + b"/" in command:
                try:
                    os.kill(int(entry.name), signal.SIGKILL)
                except ProcessLookupError:
                    pass


def steps_of(folder):
    return max((int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", p.name)),
               default=0)


def steps_for(arguments, folder, seconds, deadline):
    """The number of steps that take this time here."""
    few, many = 100, 500
    times = []
    for steps in (few, many):
        begin = time.monotonic()
        finish(train(arguments, folder / str(steps), steps), folder / str(steps), deadline)
        times.append(time.monotonic() - begin)
    rate = (many - few) / max(times[1] - times[0], 0.1)
    return max(many, int(seconds * rate))


def soak(arguments, folder):
    planned = arguments.minutes * 60
    choice = random.Random(arguments.seed)
    deadline = time.monotonic() + 2 * planned
    steps = steps_for(arguments, folder / "speed", planned / 3, deadline)
    print(f"soak: {steps} steps in {PROCESSES} processes, undisturbed", flush=True)
    finish(train(arguments, folder / "undisturbed", steps), folder / "undisturbed", deadline)

    killed = folder / "killed"
    begin = time.monotonic()
    next_kill = begin + arguments.every * choice.uniform(0.3, 1)
    kills = 0
    process = train(arguments, killed, steps)
    while process.poll() is None or process.returncode < 0:
        if process.poll() is not None:  # the launcher was killed
            process = train(arguments, killed, steps)
        time.sleep(0.05)
        now = time.monotonic()
        if now > deadline:
            fail_late(killed)
        if now < next_kill:
            continue
        names = kill(process, killed, choice)
        if names:
            kills += 1
            print(f"soak: {now - begin:6.0f} s  step {steps_of(killed)} of {steps}: killed {names}", flush=True)
            next_kill = now + arguments.every * choice.uniform(0.5, 1.5)
    finish(process, killed, deadline)
    want, got = ((f / "weights.safetensors").read_bytes() for f in (folder / "undisturbed", killed))
    if want != got:
        fail(killed, "expected the weights of the undisturbed training, got others")
    print(f"soak: after {kills} kills the weights are those of the undisturbed training, byte for byte")
    if kills == 0:
        sys.exit("soak: nothing was killed; choose more --minutes")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="default 30")
    parser.add_argument("--every", type=float, default=60, help="mean number of seconds between kills, default 60")
    parser.add_argument("--seed", type=int, default=0, help="of the kills, default 0")
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/release/apps/semitone")
    parser.add_argument("flags", nargs="*", default=["--opt-level", "O2"], help="of semitone train, after --")
    arguments = parser.parse_args()
    if not arguments.program.is_file():
        parser.error(f"no program {arguments.program}: make program")
    arguments.program = arguments.program.resolve()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="soak-"))
    try:
        soak(arguments, folder)
    finally:
        end_all(folder)
    shutil.rmtree(folder)  # unless it failed: its log says why


if __name__ == "__main__":
    main()
