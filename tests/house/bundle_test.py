#!/usr/bin/env python3
"""tools/bundle.py: what the archive contains, and that it depends on the files only. Libraries are stand-ins: nothing is downloaded.

    bundle_test.py
"""
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools/bundle.py"
LIBRARIES = json.loads((ROOT / "tools/bundle/third_party.json").read_text())


def is_work_tree():
    return shutil.which("git") and subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True).returncode == 0


class LibrariesTest(unittest.TestCase):
    def test_every_library_of_the_set_up_is_in_the_bundle(self):
        needed = set(re.findall(r'^  "([\w-]+-dev):header', (ROOT / "tools/setup.sh").read_text(), re.M))
        self.assertGreater(len(needed), 5)
        self.assertEqual(needed, {package for entry in LIBRARIES for package in entry["replaces"]})

    def test_each_has_a_version_and_a_checksum(self):
        for entry in LIBRARIES:
            self.assertRegex(entry["sha256"], r"^[0-9a-f]{64}$", entry["name"])
            self.assertTrue(entry["version"] and entry["keep"], entry["name"])

    def test_their_build_names_each_of_them(self):
        build = (ROOT / "tools/bundle/CMakeLists.txt").read_text()
        for entry in LIBRARIES:
            self.assertIn(f"{entry['name']}", build)


@unittest.skipUnless(is_work_tree(), "no git work tree: a bundle cannot be made from a bundle")
class ArchiveTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = pathlib.Path(temporary.name)
        for entry in LIBRARIES:
            (self.folder / "libraries" / entry["name"]).mkdir(parents=True)
            (self.folder / "libraries" / entry["name"] / "LICENCE").write_text("free\n")

    def make(self, name):
        file = self.folder / name
        done = subprocess.run([sys.executable, TOOL, "--out", file, "--third-party", self.folder / "libraries"], capture_output=True, text=True)
        return done, file

    def test_it_has_the_tracked_files_the_libraries_and_one_command(self):
        done, file = self.make("bundle.tar.gz")
        self.assertEqual(done.returncode, 0, done.stderr)
        with tarfile.open(file) as archive:
            names = {entry.name.removeprefix("semitone-bundle/"): entry for entry in archive.getmembers()}
            manifest = json.load(archive.extractfile("semitone-bundle/MANIFEST.json"))
            build = archive.extractfile("semitone-bundle/build.sh").read()
        tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
        self.assertEqual([name for name in tracked if name and (ROOT / name).is_file() and name not in names], [])
        self.assertEqual(build, (ROOT / "tools/bundle/build.sh").read_bytes())
        self.assertEqual(names["build.sh"].mode, 0o755)
        self.assertEqual(names["CMakeLists.txt"].mode, 0o644)
        self.assertEqual([library["name"] for library in manifest["third_party"]], [entry["name"] for entry in LIBRARIES])
        for library in manifest["third_party"]:
            self.assertIn(library["licence"], names)
        self.assertRegex(manifest["commit"], r"^[0-9a-f]{40}(-changed)?$")
        self.assertFalse([name for name in names if re.search(r"\.(a|so|o)$", name)])

    def test_the_same_files_give_the_same_archive(self):
        first, second = self.make("one.tar.gz")[1], self.make("two.tar.gz")[1]
        self.assertEqual(first.read_bytes(), second.read_bytes())

    def test_a_missing_library_is_an_error(self):
        shutil.rmtree(self.folder / "libraries/hwy")
        done, file = self.make("bundle.tar.gz")
        self.assertEqual(done.returncode, 1)
        self.assertIn("[bundle] expected a folder hwy", done.stderr)
        self.assertFalse(file.exists())


if __name__ == "__main__":
    unittest.main()
