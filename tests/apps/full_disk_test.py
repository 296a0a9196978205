#!/usr/bin/env python3
"""`semitone train` on a disk that is really full: a small tmpfs, in a mount namespace of its own.

    full_disk_test.py PROGRAM

Returns 77, and says so, where this user may not make such namespaces (unshare, of util-linux).
"""
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

PROGRAM = pathlib.Path(sys.argv[1]).resolve()
INSIDE = "--inside"  # this process is in its namespace
FIRST, SECOND, LAST = 5, 10, 12
TRAIN = ["train", "--threads", "1", "--limit-batches", LAST, "--save-every", FIRST]


def pages(file):
    """What a file takes of a tmpfs, in bytes."""
    page = os.sysconf("SC_PAGE_SIZE")
    return -(-file.stat().st_size // page) * page


def checkpoint(directory, step):
    return directory / f"step-{step:08}"


class FullDisk(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        cls.disk = cls.folder / "disk"
        done = cls.train("undisturbed", cls.folder / "undisturbed")
        assert done.returncode == 0, done.stderr
        cls.expected = (cls.folder / "undisturbed.safetensors").read_bytes()
        cls.sizes = {file.name: pages(file) for file in checkpoint(cls.folder / "undisturbed", FIRST).iterdir()}

    @classmethod
    def train(cls, name, directory):
        """A run whose weights, NAME.safetensors, are not on the small disk."""
        return cls.run_program(*TRAIN, "--resume", "auto", "--checkpoint-dir", directory, "--save-weights",
                               cls.folder / f"{name}.safetensors")

    @staticmethod
    def run_program(*words):
        return subprocess.run([str(word) for word in (PROGRAM, *words)], capture_output=True, text=True, timeout=300)

    def mount(self, size):
        self.disk.mkdir()
        self.addCleanup(self.disk.rmdir)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", self.disk], check=True)
        self.addCleanup(subprocess.run, ["umount", self.disk], check=True)

    def expect_to_continue_when_there_is_space(self, room, name, full):
        """The second checkpoint has less space than it needs: the file `full` is the one that does not fit."""
        run = self.disk / "run"
        other = self.disk / "other"
        total = sum(self.sizes.values())
        self.mount(3 * total)
        other.write_bytes(bytes(2 * total - room))

        done = self.train(name, run)
        self.assertEqual(done.returncode, 1, done.stderr)
        errors = [line for line in done.stderr.splitlines() if "No space left on device" in line]
        # Each save that fails is one line: those within the run, and the last, which is the run's result.
        self.assertEqual(len(errors), 2, done.stderr)
        for step, error in zip((SECOND, LAST), errors):
            self.assertIn(f"'{checkpoint(run, step)}.partial/{full}', got No space left on device", error)
        self.assertTrue(errors[-1].startswith("[checkpoint.save] "), done.stderr)
        self.assertEqual([file.name for file in run.iterdir()], [checkpoint(run, FIRST).name])

        # The earlier checkpoint is whole, and a run continues from it also while the disk is full.
        from_first = self.folder / f"{name}_from_first.safetensors"
        loaded = self.run_program(*TRAIN[:-2], "--resume", checkpoint(run, FIRST), "--save-weights", from_first)
        self.assertEqual(loaded.returncode, 0, loaded.stderr)
        self.assertTrue(from_first.read_bytes() == self.expected, "other weights from the earlier checkpoint")

        other.unlink()
        weights = self.folder / f"{name}.safetensors"
        weights.unlink(missing_ok=True)
        done = self.train(name, run)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr, rf"(?i)resum.*\b0*{FIRST}\b")
        self.assertTrue(weights.read_bytes() == self.expected, "other weights")
        self.assertEqual(sorted(file.name for file in run.iterdir()),
                         [checkpoint(run, step).name for step in (FIRST, SECOND, LAST)])

    def test_in_the_middle_of_the_first_large_file(self):
        self.expect_to_continue_when_there_is_space(self.sizes["optimizer.pt"] // 2, "optimizer", "optimizer.pt")

    def test_at_the_manifest(self):
        room = sum(self.sizes.values()) - self.sizes["manifest.json"]
        self.expect_to_continue_when_there_is_space(room, "manifest", "manifest.json")


def inside(*command):
    return ["unshare", "--map-root-user", "--mount", *command]


if __name__ == "__main__":
    if INSIDE in sys.argv:
        unittest.main(argv=sys.argv[:1], verbosity=2)
    if shutil.which("unshare") is None:
        print("full_disk_test: SKIPPED, since there is no unshare", file=sys.stderr)
        sys.exit(77)
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run(inside("mount", "-t", "tmpfs", "tmpfs", folder), capture_output=True, text=True)
    if tried.returncode != 0:
        print(f"full_disk_test: SKIPPED, since this user may not mount in a namespace: {tried.stderr.strip()}", file=sys.stderr)
        sys.exit(77)
    sys.exit(subprocess.run(inside(sys.executable, __file__, str(PROGRAM), INSIDE)).returncode)
