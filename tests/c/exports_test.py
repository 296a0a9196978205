"""libsemitone_c exports the functions of its header and no other symbol, and each has a test.

    exports_test.py NM LIBRARY HEADER TESTS
"""
import pathlib
import re
import subprocess
import sys
import unittest

NM = LIBRARY = HEADER = TESTS = None  # from the command line


class ExportsTest(unittest.TestCase):
    def setUp(self):
        text = re.sub(r"//[^\n]*", "", pathlib.Path(HEADER).read_text())
        self.declared = set(re.findall(r"\b(semitone_\w+)\(", text))

    def test_the_header_and_the_library_have_the_same_functions(self):
        self.assertGreater(len(self.declared), 40)
        listed = subprocess.run([NM, "-D", "--defined-only", LIBRARY], capture_output=True, text=True, check=True).stdout
        self.assertEqual({line.split()[-1].split("@")[0] for line in listed.splitlines()}, self.declared)

    def test_every_function_has_a_test(self):
        tests = {path: path.read_text() for path in pathlib.Path(TESTS).glob("*_test.*")}
        tests[None] = pathlib.Path(TESTS, "semitone_c.py").read_text()
        words = set(re.findall(r"\w+", "\n".join(tests.values())))
        self.assertEqual(sorted(self.declared - words), [])



if __name__ == "__main__":
    NM, LIBRARY, HEADER, TESTS = sys.argv[1:5]
    del sys.argv[1:5]
    unittest.main()
