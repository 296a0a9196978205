"""libsemitone_c exports the functions of its header and no other symbol, each has a test, and none is lost or changed.

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

    def test_what_programs_were_compiled_with_is_still_there(self):
        """declared-MAJOR.MINOR.txt has the functions, types, values and options of a soname, which only gains others: add these to it."""
        version = dict(re.findall(r"#define SEMITONE_VERSION_(M\w+) (\d+)", pathlib.Path(HEADER, "../../core/version.h").resolve().read_text()))
        kept = pathlib.Path(TESTS, f"declared-{version['MAJOR']}.{version['MINOR']}.txt").read_text().splitlines()
        self.assertGreater(len(kept), 100)
        options = re.findall(r'Setter<(\w+)>\{\s*"(\w+)"', pathlib.Path(HEADER, "../../../../src/c/options.cpp").resolve().read_text())
        self.assertGreater(len(options), 15)
        now = [*declarations(pathlib.Path(HEADER).read_text()), *(f"{of}: {name}" for of, name in options)]
        self.assertEqual([line for line in kept if line not in now], [], "lost or changed: a program that uses them would break")
        self.assertEqual([line for line in now if line not in kept], [], "new: add them to the file")


def declarations(text):
    """The declarations of a C header, each in a line, and of an enumeration each value."""
    text = re.sub(r'//[^\n]*|^#[^\n]*|extern "C" \{', "", text, flags=re.M)
    text = re.sub(r"\benum \{([^}]*)\}", lambda values: values.group(1).replace(",", ";"), text)
    found, depth = [""], 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if character == ";" and depth == 0:
            found.append("")
        else:
            found[-1] += character
    return [" ".join(declaration.split()) for declaration in found if declaration.strip(" \n}")]


if __name__ == "__main__":
    NM, LIBRARY, HEADER, TESTS = sys.argv[1:5]
    del sys.argv[1:5]
    unittest.main()
