#!/usr/bin/env python3
"""Trains on three hosts, and breaks them: the whole program, over a network whose cables can be pulled.

    sudo tests/hosts/multi_host_test.py [PROGRAM, default build/release/apps/semitone]      about four minutes

It needs root, and leaves nothing behind (tools/hosts.py). Where network namespaces can be made, ctest runs all classes but
OtherLaunchers: Failures and Repairs, which wait for heartbeats, in two minutes, and the others in less than two. OtherLaunchers
needs torchrun (or TORCHRUN, its path) and mpirun, and runs by hand; launched_test is ctest's test of these launchers.
"""
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from hosts import Hosts  # noqa: E402

PROGRAM = ROOT / "build/release/apps/semitone"
COUNT = 3
SHORT = ["train", "--limit-batches", "30", "--threads", "1", "--quiet"]
LONG = ["train", "--epochs", "100", "--threads", "1", "--quiet"]
# 30 s without a sign of life, 10 s from SIGTERM to SIGKILL, and some for a busy machine.
TIMEOUT = 60
# The results of one training, the same for any number of hosts and any launcher.
SAME = ["steps", "processes", "train_loss", "test_loss", "test_accuracy", "skipped_steps", "final_loss_scale"]


def cpu_seconds(process):
    fields = pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def eventually(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def result(self, command, **options):
        """What a training that writes to a file in the place of {} has computed."""
        path = self.folder / "result.json"
        done = subprocess.run([str(word).replace("{}", str(path)) for word in command], capture_output=True, text=True, timeout=120,
                              **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        return self.same(path)

    def same(self, path):
        result, = json.loads(path.read_text())
        return {key: result[key] for key in SAME}

    computed = {}  # on one host, by the number of processes

    def on_one_host(self, processes):
        if processes not in self.computed:
            self.computed[processes] = self.result([PROGRAM, *SHORT, "--nproc", processes, "--json", "{}"])
        return self.computed[processes]

    def environment(self, **more):
        """Nothing of a launcher, but this."""
        names = re.compile(r"(RANK|WORLD_SIZE|LOCAL_|MASTER_|TORCHELASTIC_|OMPI_|SLURM_|PMI_|MPI_|MV2_|PALS_)")
        return {**{key: value for key, value in os.environ.items() if not names.match(key)}, **more}


class SeveralHosts(Folder):
    OWN_NAMES = False

    def setUp(self):
        super().setUp()
        hosts = Hosts(COUNT, own_names=self.OWN_NAMES)
        self.hosts = hosts.__enter__()
        self.addCleanup(hosts.__exit__, None, None, None)  # enterContext() is new in Python 3.11

    def start(self, command_of, environment_of=lambda number: {}):
        self.launchers = []
        for number, host in enumerate(self.hosts):
            with open(self.folder / f"log{number}", "w") as log:
                self.launchers.append(host.start(command_of(number), stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                                                 env=self.environment(**environment_of(number))))

    def launch(self, training):
        self.start(lambda number: [PROGRAM, "launch", "--nnodes", COUNT, "--rdzv-endpoint", self.hosts[0].address, PROGRAM, *training])

    def log(self, number):
        return (self.folder / f"log{number}").read_text()

    def codes(self, seconds):
        """Exit codes of the launchers; None for one that is still running then."""
        eventually(lambda: all(launcher.poll() is not None for launcher in self.launchers), seconds)
        return [launcher.poll() for launcher in self.launchers]

    def workers(self):
        """Process numbers of the ranks, by rank, once all have trained for a while."""
        found = {}

        def all_train():
            for host in self.hosts:
                for process in host.processes():
                    try:
                        environment = pathlib.Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
                        command = pathlib.Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
                        rank = [int(word[5:]) for word in environment if word.startswith(b"RANK=")]
                        if rank and command[1:2] == [b"train"] and cpu_seconds(process) > 2:
                            found[rank[0]] = process
                    except (FileNotFoundError, ProcessLookupError):
                        pass
            return len(found) == COUNT

        self.assertTrue(eventually(all_train), f"only {found}: " + "".join(map(self.log, range(COUNT))))
        return found

    def host_of(self, process):
        return next(number for number, host in enumerate(self.hosts) if process in host.processes())

    def expect_no_processes(self):
        for number, host in enumerate(self.hosts):
            self.assertTrue(eventually(lambda: not host.processes(), 5), f"processes are left on host {number}")

    def expect_all_end(self, rank, seconds, others):
        """All launchers return something but 0 in time, those of `others` name the rank, and nothing is left."""
        codes = self.codes(seconds)
        logs = [self.log(number) for number in range(COUNT)]
        for number in range(COUNT):
            self.assertIsNotNone(codes[number], f"host {number} still runs:\n{logs[number]}")
            self.assertNotEqual(codes[number], 0, logs[number])
        for number in others:
            self.assertRegex(logs[number], rf"\b(rank|process) {rank}\b", f"host {number}")
        self.expect_no_processes()
        if os.environ.get("VERBOSE"):
            print(codes, *logs, sep="\n---\n", file=sys.stderr)


class Training(SeveralHosts):
    def test_three_launchers_train_as_three_processes_of_one_host_do(self):
        self.start(lambda number: [PROGRAM, "launch", "--nnodes", COUNT, "--rdzv-endpoint", self.hosts[0].address, PROGRAM, *SHORT,
                                   "--json", self.folder / "result.json"])
        self.assertEqual(self.codes(120), [0] * COUNT, "".join(map(self.log, range(COUNT))))
        self.assertEqual(self.same(self.folder / "result.json"), self.on_one_host(COUNT))

    def test_numbered_nodes_of_train_do_too(self):
        self.start(lambda number: [PROGRAM, *SHORT, "-n", COUNT, "-g", 1, "-nr", number, "--master-addr", self.hosts[0].address,
                                   "--json", self.folder / f"result{number}.json"])
        self.assertEqual(self.codes(120), [0] * COUNT, "".join(map(self.log, range(COUNT))))
        self.assertEqual(self.same(self.folder / "result0.json"), self.on_one_host(COUNT))


class SlowLines(SeveralHosts):
    """Two hosts compute the same over any lines, and take the time that the lines do."""

    NODES = 2
    STEPS = 30
    BURST = 131_072  # what goes at any speed: that of Hosts

    def setUp(self):
        Folder.setUp(self)

    def train(self, name, rate=None, slower=None):
        """The weights of a training, and its seconds. `slower`: the rate of what host 1 sends, in Mbit/s."""
        training = [*SHORT, "--save-weights", self.folder / f"{name}.safetensors", "--json", self.folder / f"{name}.json"]
        with Hosts(self.NODES, rate=rate and f"{rate}mbit") as self.hosts:
            if slower is not None:
                subprocess.run(["tc", "-n", self.hosts[1].namespace, "qdisc", "replace", "dev", "eth0", "root", "tbf", "rate",
                                f"{slower}mbit", "burst", str(self.BURST), "latency", "50ms"], check=True)
            self.start(lambda number: [PROGRAM, "launch", "--nnodes", self.NODES, "--rdzv-endpoint", self.hosts[0].address, PROGRAM,
                                       *training])
            self.assertEqual(self.codes(120), [0] * self.NODES, "".join(map(self.log, range(self.NODES))))
        result, = json.loads((self.folder / f"{name}.json").read_text())
        self.assertEqual(result["steps"], self.STEPS)
        return (self.folder / f"{name}.safetensors").read_bytes(), result["train_seconds"]

    def test_of_which_one_is_slower(self):
        fast, _ = self.train("fast")
        self.assertGreater(len(fast), 100_000)
        for name, rates in {"slow": {"rate": 10}, "slower": {"rate": 10, "slower": 5}}.items():
            with self.subTest(name):
                weights, seconds = self.train(name, **rates)
                # At every step each host sends the gradients, which are about as large as the file of weights.
                bits = 8 * (0.9 * self.STEPS * len(fast) - self.BURST)
                self.assertGreater(seconds, bits / (min(rates.values()) * 1e6), "the lines are not slow")
                self.assertTrue(weights == fast, "other weights")


class Operators(SeveralHosts):
    """As Kubernetes operators start processes: no LOCAL_ variables, and in the master's pod MASTER_ADDR is localhost."""

    def test_a_master_that_knows_itself_as_localhost(self):
        self.start(lambda number: [PROGRAM, *SHORT, "--json", self.folder / "result.json"],
                   lambda number: {"RANK": str(number), "WORLD_SIZE": str(COUNT), "MASTER_PORT": "29500",
                                   "MASTER_ADDR": "localhost" if number == 0 else self.hosts[0].address})
        self.assertEqual(self.codes(120), [0] * COUNT, "".join(map(self.log, range(COUNT))))
        self.assertEqual(self.same(self.folder / "result.json"), self.on_one_host(COUNT))


class LateNames(SeveralHosts):
    """As in a cluster whose name servers do not know a pod when it starts."""

    OWN_NAMES = True
    SAY_RANK = ["sh", "-c", "echo rank $RANK meets at $MASTER_ADDR"]

    def expect_to_meet(self, command_of):
        self.start(command_of)
        time.sleep(1.5)
        self.assertEqual(self.codes(0), [None] * COUNT, "".join(map(self.log, range(COUNT))))
        for host in self.hosts:
            host.know("pod-0", self.hosts[0].address)
        self.assertEqual(self.codes(60), [0] * COUNT, "".join(map(self.log, range(COUNT))))
        said = sorted(re.findall(r"rank \d+ meets at .*", "\n".join(map(self.log, range(COUNT)))))
        self.assertEqual(said, [f"rank {rank} meets at pod-0" for rank in range(COUNT)])

    def test_of_an_endpoint(self):
        self.expect_to_meet(lambda number: [PROGRAM, "launch", "--nnodes", COUNT, "--rdzv-endpoint", "pod-0", "--", *self.SAY_RANK])

    def test_of_node_0(self):
        self.expect_to_meet(lambda number: [PROGRAM, "launch", "--nnodes", COUNT, "--node-rank", number, "--master-addr", "pod-0", "--",
                                            *self.SAY_RANK])


class Failing(SeveralHosts):
    def setUp(self):
        super().setUp()
        self.launch(LONG)
        self.ranks = self.workers()


class Failures(Failing):
    def test_a_pulled_cable_ends_all(self):
        rank = 2
        cut = self.host_of(self.ranks[rank])
        if cut == 0:
            rank, cut = 1, self.host_of(self.ranks[1])
        self.hosts[cut].unplug()
        self.expect_all_end(rank, TIMEOUT, [number for number in range(COUNT) if number != cut])

    def test_a_stopped_rank_ends_all(self):
        os.kill(self.ranks[1], signal.SIGSTOP)
        self.expect_all_end(1, TIMEOUT, range(COUNT))


class Kills(Failing):
    def test_a_killed_rank_ends_all_at_once(self):
        os.kill(self.ranks[1], signal.SIGKILL)
        self.expect_all_end(1, 15, range(COUNT))

    def test_a_killed_launcher_ends_all_at_once(self):
        rank = 1 if self.host_of(self.ranks[1]) != 0 else 2
        cut = self.host_of(self.ranks[rank])
        # The first there: `ip netns exec` becomes the launcher.
        os.kill(self.launchers[cut].pid, signal.SIGKILL)
        self.expect_all_end(rank, 15, [number for number in range(COUNT) if number != cut])


class Repairs(SeveralHosts):
    """A job survives a broken line, and ends with the weights of an undisturbed one."""

    undisturbed = []  # the weights of `train --nproc 3`, once they are needed

    def training(self, name):
        return ["train", "--limit-batches", "60", "--threads", "1", "--quiet", "--resume", "auto", "--save-every", "5",
                "--checkpoint-dir", self.folder / name, "--save-weights", self.folder / f"{name}.safetensors"]

    def start_on(self, number, heartbeat_timeout):
        with open(self.folder / f"log{number}", "a") as log:
            return self.hosts[number].start(
                [PROGRAM, "launch", "--nnodes", COUNT, "--rdzv-endpoint", self.hosts[0].address, "--max-restarts", 3,
                 "--heartbeat-timeout", heartbeat_timeout, PROGRAM, *self.training("run")],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.environment())

    def last_saved(self):
        return max((int(folder.name[5:]) for folder in (self.folder / "run").glob("step-*[0-9]")), default=0)

    def unplug_in_training(self, heartbeat_timeout):
        """Unplugs host 1 once there is a checkpoint."""
        self.launchers = [self.start_on(number, heartbeat_timeout) for number in range(COUNT)]
        self.assertTrue(eventually(self.last_saved), self.log(0))
        self.hosts[1].unplug()

    def expect_to_end_as_undisturbed(self):
        self.assertEqual(self.codes(180), [0] * COUNT, "".join(map(self.log, range(COUNT))))
        self.expect_no_processes()
        if not self.undisturbed:
            done = subprocess.run([str(word) for word in [PROGRAM, *self.training("undisturbed"), "--nproc", COUNT]],
                                  capture_output=True, text=True, timeout=180, env=self.environment())
            self.assertEqual(done.returncode, 0, done.stderr)
            self.undisturbed.append((self.folder / "undisturbed.safetensors").read_bytes())
        self.assertGreater(len(self.undisturbed[0]), 100_000)
        self.assertTrue((self.folder / "run.safetensors").read_bytes() == self.undisturbed[0], "other weights")

    def test_a_cable_that_is_pulled_and_plugged_in_again(self):
        self.unplug_in_training(heartbeat_timeout=5)
        # Its launcher does not reach node 0 any more. A person or a supervisor starts it again when
        # the cable is back.
        self.assertNotEqual(self.launchers[1].wait(TIMEOUT), 0, self.log(1))
        self.hosts[1].plug()
        self.launchers[1] = self.start_on(1, heartbeat_timeout=5)
        self.expect_to_end_as_undisturbed()
        self.assertIn("is lost", self.log(0))

    def test_a_line_that_is_down_for_two_seconds(self):
        # Far longer than TCP waits afterwards until it sends again.
        self.unplug_in_training(heartbeat_timeout=30)
        saved = self.last_saved()
        time.sleep(2)
        # The training stands still, and is not done: it may have been saving when the line broke.
        self.assertLessEqual(self.last_saved(), min(saved + 5, 55))
        self.assertEqual(self.codes(0), [None] * COUNT, "".join(map(self.log, range(COUNT))))
        self.hosts[1].plug()
        self.expect_to_end_as_undisturbed()
        for number in range(COUNT):
            self.assertNotIn("restarting", self.log(number))


class OtherLaunchers(Folder):
    """The same binary, started by others, computes what `--nproc 2` does."""

    def test_torchrun(self):
        torchrun = os.environ.get("TORCHRUN") or shutil.which("torchrun")
        self.assertIsNotNone(torchrun, "torchrun is not here: set TORCHRUN")
        got = self.result([torchrun, "--standalone", "--no-python", "--nproc-per-node", 2, PROGRAM, *SHORT, "--json", "{}"],
                          env=self.environment())
        self.assertEqual(got, self.on_one_host(2))

    def test_mpirun(self):
        mpirun = shutil.which("mpirun")
        self.assertIsNotNone(mpirun, "mpirun is not here: install openmpi-bin")
        got = self.result([mpirun, "--allow-run-as-root", "--oversubscribe", "-np", 2, PROGRAM, *SHORT, "--json", "{}"],
                          env=self.environment(MASTER_PORT="29611"))
        self.assertEqual(got, self.on_one_host(2))


if __name__ == "__main__":
    if len(sys.argv) > 1 and pathlib.Path(sys.argv[1]).is_file():
        PROGRAM = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main(verbosity=2)
