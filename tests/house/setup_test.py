#!/usr/bin/env python3
"""What tools/setup.sh says about programs that are too old, before it downloads anything."""
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

SETUP = pathlib.Path(__file__).resolve().parents[2] / "tools" / "setup.sh"


class Libraries(unittest.TestCase):
    def test_every_library_whose_headers_are_included_is_installed(self):
        root = SETUP.parents[1]
        others = {"torch", "ATen", "c10", "caffe2",  # LibTorch's
                  "sys", "net", "netinet", "arpa", "linux",  # the C library's
                  "sanitizer", "semitone"}
        sources = [file for room in ["include", "src", "apps", "tests", "examples", "benchmarks"]
                   for pattern in ["*.h", "*.cpp"] for file in (root / room).rglob(pattern)]
        included = {folder for file in sources for folder in re.findall(r"^#\s*include <(\w+)/", file.read_text(), re.M)}
        self.assertIn("gtest", included)
        self.assertLessEqual(included - others, set(re.findall(r":header (\w+)/", SETUP.read_text())))


    def test_a_prefix_without_root_has_every_library(self):
        libraries = set(re.findall(r'^  "([\w-]+-dev):header', SETUP.read_text(), re.M))
        default = re.search(r"packages=\((lib[^)]*)\)", (SETUP.parent / "make_prefix.sh").read_text()).group(1)
        self.assertEqual(set(default.split()), libraries)


class Setup(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        (self.root / "tools").mkdir()
        (self.root / "bin").mkdir()
        shutil.copy(SETUP, self.root / "tools")
        # Nothing is to be fetched here.
        for program in ["apt-get", "sudo", "pip"]:
            self.program(program, f"echo {program} >> {self.root}/fetched; exit 1")

    def program(self, name, script):
        path = self.root / "bin" / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def run_setup(self, **variables):
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        return subprocess.run([self.root / "tools" / "setup.sh"], capture_output=True, text=True,
                              env={**os.environ, "PATH": path, **variables})

    def install_everything(self):
        """Stand-ins for headers and programs that this machine may not have. Returns the variable that names the headers' folder."""
        for header in re.findall(r':header (\S+)"', SETUP.read_text()):
            file = self.root / "include" / header
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
        for program in re.findall(r':command -v (\S+)"', SETUP.read_text()):
            if not shutil.which(program):
                self.program(program, "exit 0")
        return {"CPLUS_INCLUDE_PATH": str(self.root / "include")}

    def expect_refusal(self, done, message):
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn(message, done.stderr)
        self.assertFalse((self.root / "fetched").exists())

    def test_an_old_cmake(self):
        self.program("cmake", "echo 'cmake version 3.22.1'")
        self.expect_refusal(self.run_setup(), "expected cmake 3.25 or newer, got 3.22.1")

    def test_an_old_compiler(self):
        self.program("cmake", "echo 'cmake version 3.100.0'")
        self.program("c++", "echo 'c++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0'")
        self.expect_refusal(self.run_setup(CXX=""), "expected c++ 12 or newer, got 11.4.0")

    def test_an_old_clang_that_was_chosen(self):
        self.program("cmake", "echo 'cmake version 4.0.0'")
        self.program("my-clang", "echo 'Ubuntu clang version 11.1.0-6'")
        self.expect_refusal(self.run_setup(CXX="my-clang"), "expected my-clang 14 or newer, got 11.1.0")

    def test_an_old_highway_of_the_distribution(self):
        script = self.root / "tools" / "setup.sh"
        script.write_text(script.read_text().replace("/usr/include /usr/local/include", ""))  # as if nothing were installed
        self.program("cmake", "echo 'cmake version 4.0.0'")
        self.program("c++", "echo 'c++ (Ubuntu 12.3.0-1ubuntu1~22.04) 12.3.0'")
        self.program("apt-cache", "echo '  Candidate: 0.16.0-1'")
        self.expect_refusal(self.run_setup(CXX="", CPLUS_INCLUDE_PATH=""), "expected libhwy-dev 1.0.3 or newer, got 0.16.0")

    def test_an_old_highway_that_is_installed(self):
        script = self.root / "tools" / "setup.sh"
        script.write_text(script.read_text().replace("/usr/include /usr/local/include", ""))
        self.program("cmake", "echo 'cmake version 4.0.0'")
        self.program("c++", "echo 'c++ (Ubuntu 12.3.0-1ubuntu1~22.04) 12.3.0'")
        variables = self.install_everything()

        def version(file, major, minor):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"#define HWY_MAJOR {major}\n#define HWY_MINOR {minor}\n#define HWY_PATCH 0\n")

        version(self.root / "include/hwy/highway.h", 0, 16)
        self.expect_refusal(self.run_setup(CXX="", **variables), "expected libhwy-dev 1.0.3 or newer, got 0.16.0")
        # A newer one beside it, whose version is in another header.
        (self.root / "own/include/hwy").mkdir(parents=True)
        (self.root / "own/include/hwy/highway.h").touch()
        version(self.root / "own/include/hwy/base.h", 1, 2)
        (self.root / "libtorch/lib").mkdir(parents=True)
        (self.root / "libtorch/lib/libtorch_cpu.so").touch()
        done = self.run_setup(CXX="", CUDA="0", SEMITONE_LIBTORCH=str(self.root / "libtorch"), CMAKE_PREFIX_PATH=str(self.root / "own"),
                              **variables)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_paths_with_spaces(self):
        self.expect_refusal(self.run_setup(SEMITONE_LIBTORCH="/my libraries/torch"), "expected paths without spaces")

    def test_a_download_waits_for_another_run(self):
        self.program("flock", f"mkdir -p {self.root}/.deps/libtorch-2.11.0; touch {self.root}/.deps/libtorch-2.11.0/complete")
        done = self.run_setup(TORCH="2.11.0", CUDA="0", SEMITONE_LIBTORCH="", SEMITONE_MACHINE="", **self.install_everything())
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("LibTorch 2.11.0: there", done.stdout)

    def test_cuda_that_is_neither_wanted_nor_not(self):
        self.expect_refusal(self.run_setup(CUDA="yes"), "expected CUDA=1 or CUDA=0, got CUDA=yes")

    def test_a_given_libtorch_without_the_cuda_that_is_wanted(self):
        (self.root / "libtorch" / "lib").mkdir(parents=True)
        (self.root / "libtorch" / "lib" / "libtorch_cpu.so").touch()
        done = self.run_setup(CUDA="1", SEMITONE_LIBTORCH=str(self.root / "libtorch"), **self.install_everything())
        self.expect_refusal(done, "expected lib/libtorch_cuda.so in SEMITONE_LIBTORCH, got none")

    def test_an_old_candidate_where_none_is_installed(self):
        for program in ["bash", "dirname", "sed", "sort", "head", "id", "seq", "uname", "printf", "cat"]:
            os.symlink(shutil.which(program), self.root / "bin" / program)
        self.program("apt-cache", "echo '  Candidate: 3.22.1-1ubuntu1'")
        done = self.run_setup(PATH=str(self.root / "bin"))
        self.expect_refusal(done, "expected cmake 3.25 or newer, got 3.22.1")


class Makefile(unittest.TestCase):
    def test_the_hour_with_a_gpu_is_built_for_one(self):
        chosen = ("MAKE", "MFLAGS", "SEMITONE_", "CUDA", "TORCH", "PRESET")
        variables = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
        done = subprocess.run(["make", "-n", "gpu-hour", "TORCH=2.15.0"], cwd=SETUP.parents[1], capture_output=True, text=True, env=variables)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("/.deps/libtorch-2.15.0-cuda/torch", done.stdout)
        self.assertRegex(done.stdout, r"gpu_hour.py --build \S*/build/cuda-torch2.15.0\b")


if __name__ == "__main__":
    unittest.main()
