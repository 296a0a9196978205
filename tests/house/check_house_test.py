"""That tools/check_house.py accepts this repository and finds each kind of violation."""
import importlib.util
import pathlib
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("check_house", ROOT / "tools" / "check_house.py")
check_house = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_house)


def problems_of(files):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        files = {"src/rooms.txt": (ROOT / "src/rooms.txt").read_text(), **files}
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return check_house.check(root)


class CheckHouse(unittest.TestCase):
    def test_this_repository_is_in_order(self):
        self.assertEqual(check_house.check(ROOT), [])

    def test_arrows_go_one_way(self):
        self.assertEqual(problems_of({"src/amp/a.cpp": '#include "semitone/core/error.h"\n'}), [])
        found = problems_of({"src/core/a.cpp": '#include "semitone/autocast/autocast.h"\n'})
        self.assertEqual(found, ["src/core/a.cpp:1: room 'core' may not include room 'autocast'"])
        self.assertEqual(len(problems_of({"src/kernels/a.cpp": '#include "src/autocast/dispatch.h"\n'})), 1)

    def test_the_page_draws_the_arrows_of_the_table(self):
        table = {"src/rooms.txt": "core:\nkernels: core\n"}
        core = "| `core` | errors | LibTorch |\n"
        self.assertEqual(problems_of({**table, "docs/house.md": core + "| `kernels` (private) | memory | `core` |\n"}), [])
        self.assertEqual(len(problems_of({**table, "docs/house.md": core + "| `kernels` (private) | memory | `amp` |\n"})), 1)
        self.assertEqual(len(problems_of({**table, "docs/house.md": core})), 1)

    def test_public_headers_are_clean(self):
        for text in ("#include <fmt/format.h>", "#include <cuda_runtime.h>", '#include "src/autocast/dispatch.h"', "#ifdef SEMITONE_CUDA"):
            with self.subTest(text):
                self.assertEqual(len(problems_of({"include/semitone/amp/a.h": f"#pragma once\n{text}\n"})), 1)

    def test_examples_use_public_headers_only(self):
        private = '#include "src/core/file.h"\n'
        self.assertEqual(problems_of({"examples/a.cpp": private}), ["examples/a.cpp:1: examples use public headers only"])
        self.assertEqual(problems_of({"apps/semitone/a.cpp": private}), [])

    def test_private_headers_are_for_their_room_unless_they_say_otherwise(self):
        files = {"include/semitone/nn/layer.h": "#pragma once\n", "src/autocast/a.cpp": '#include "src/nn/a.h"\n'}
        self.assertEqual(problems_of({**files, "src/nn/a.h": "#pragma once\n// Internal interface: for others.\n"}), [])
        found = problems_of({**files, "src/nn/a.h": "#pragma once\n"})
        self.assertEqual(len(found), 1)
        self.assertIn("src/nn/a.h is private to room 'nn'", found[0])

    def test_each_test_is_in_a_program(self):
        files = {"tests/core/a_test.cpp": "", "tests/zoo/b_test.cpp": "", "tests/core/tool.cpp": "",
                 "tests/CMakeLists.txt": "semitone_test(core_test SOURCES core/a_test.cpp)\nfile(GLOB zoo_tests zoo/*_test.cpp)\n"}
        self.assertEqual(problems_of(files), [])
        found = problems_of({**files, "tests/core/aa_test.cpp": ""})
        self.assertEqual(found, ["tests/core/aa_test.cpp: no program of tests/CMakeLists.txt has it"])

    def test_umbrellas_include_every_public_header(self):
        header = {"src/rooms.txt": "nn: | | semitone/nn.h\n", "include/semitone/nn/a.h": "#pragma once\n",
                  "include/semitone/nn/detail/b.h": "#pragma once\n"}
        umbrella = "include/semitone/nn.h"
        self.assertEqual(problems_of({**header, umbrella: '#pragma once\n#include "semitone/nn/a.h"\n'}), [])
        self.assertEqual(problems_of({**header, umbrella: "#pragma once\n"}), [f"{umbrella}: does not include semitone/nn/a.h"])
        whole = {**header, umbrella: '#pragma once\n#include "semitone/nn/a.h"\n', "include/semitone/semitone.h": "#pragma once\n"}
        self.assertEqual(problems_of(whole), ["include/semitone/semitone.h: does not include semitone/nn.h"])

    def test_headers_have_a_guard(self):
        self.assertEqual(len(problems_of({"include/semitone/amp/a.h": "int x;\n"})), 1)

    def test_the_library_neither_prints_nor_exits(self):
        for text in ("std::exit(1);", 'printf("x");', 'std::cout << "x";', "abort();"):
            with self.subTest(text):
                self.assertEqual(len(problems_of({"src/amp/a.cpp": text + "\n"})), 1)
        self.assertEqual(problems_of({"src/amp/a.cpp": "// printf() is not for libraries\nstd::snprintf(a, b, c);\n"}), [])

    def test_cuda_sources_are_free_of_libtorch(self):
        for name in ("adam.cu", "launch.cuh", "no_cuda.cpp"):
            with self.subTest(name):
                text = "#pragma once\n#include <cuda_runtime.h>\n"
                self.assertEqual(problems_of({f"src/kernels/cuda/{name}": text}), [])
                for header in ("ATen/ATen.h", "torch/types.h", "c10/core/Device.h"):
                    found = problems_of({f"src/kernels/cuda/{name}": f"{text}#include <{header}>\n"})
                    self.assertEqual(found, [f"src/kernels/cuda/{name}:3: CUDA sources know nothing of LibTorch"])
        self.assertEqual(problems_of({"src/kernels/on_cuda.h": "#pragma once\n#include <ATen/ATen.h>\n"}), [])

    def test_headers_include_one_another_in_one_direction(self):
        one = {"include/semitone/amp/a.h": '#pragma once\n#include "semitone/amp/b.h"\n'}
        two = {"include/semitone/amp/b.h": '#pragma once\n#include "src/amp/c.h"  // private\n'}
        self.assertEqual(problems_of({**one, "include/semitone/amp/b.h": "#pragma once\n"}), [])
        for last in ("semitone/amp/a.h", "src/amp/c.h"):
            with self.subTest(last):
                three = {"src/amp/c.h": f'#pragma once\n#include "{last}"\n'}
                found = [problem for problem in problems_of({**one, **two, **three}) if "cycle" in problem]
                self.assertEqual(len(found), 1)
                self.assertIn("src/amp/c.h -> ", found[0])
        # A comment is no include, and sources may include anything.
        self.assertEqual(problems_of({**one, "include/semitone/amp/b.h": '#pragma once\n// #include "semitone/amp/a.h"\n',
                                      "src/amp/a.cpp": '#include "semitone/amp/a.h"\n'}), [])

    def test_no_header_includes_the_top_header_of_its_room(self):
        table = {"src/rooms.txt": "core:\ncomm: core | semitone/comm/init.h\ntrain: comm core\n"}
        text = '#pragma once\n#include "semitone/comm/init.h"\n'
        for name in ("include/semitone/comm/group.h", "src/comm/store.h"):
            with self.subTest(name):
                self.assertEqual(problems_of({**table, name: text}),
                                 [f"{name}: includes the top header of its room, semitone/comm/init.h"])
        for name in ("src/comm/init.cpp", "src/train/trainer.h", "apps/semitone/flags.h"):
            with self.subTest(name):
                self.assertEqual(problems_of({**table, name: text}), [])

    def test_a_room_must_be_known(self):
        self.assertEqual(len(problems_of({"src/cellar/a.cpp": "int x;\n"})), 1)


if __name__ == "__main__":
    unittest.main()
