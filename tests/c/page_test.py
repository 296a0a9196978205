"""Compiles and runs the programs in docs/c_interface.md.

    SEMITONE_C_LIBRARY=… page_test.py PAGE INCLUDE COMPILER…
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

PAGE = INCLUDE = COMPILER = None  # from the command line
LIBRARY = pathlib.Path(os.environ["SEMITONE_C_LIBRARY"])


class PageTest(unittest.TestCase):
    def block(self, language):
        blocks = re.findall(rf"^```{language}\n(.*?)^```$", pathlib.Path(PAGE).read_text(), re.M | re.S)
        self.assertEqual(len(blocks), 1)
        return blocks[0]

    def test_c(self):
        with tempfile.TemporaryDirectory() as folder:
            source, program = pathlib.Path(folder, "page.c"), pathlib.Path(folder, "page")
            source.write_text(self.block("c"))
            subprocess.run([*COMPILER, "-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", f"-I{INCLUDE}", source, "-o", program,
                            LIBRARY, f"-Wl,-rpath,{LIBRARY.parent},--allow-shlib-undefined"], check=True)
            done = subprocess.run([program], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"^y = (2\.9|3\.0)\d x \+ (0\.9|1\.0)\d\n$")

    def test_python(self):
        done = subprocess.run([sys.executable, "-c", self.block("python")], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("the scale is 1024.0", done.stdout)


if __name__ == "__main__":
    PAGE, INCLUDE, *COMPILER = sys.argv[1:]
    unittest.main(argv=sys.argv[:1])
