#!/usr/bin/env python3
"""Tests of `semitone completion` and `semitone manual`: completion_test.py PROGRAM [TEST...]

Bash runs the script in bash. Zsh, Fish and Groff need these programs, and are registered where they are installed.
"""
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

PROGRAM = sys.argv.pop(1)
MACROS = {"TH", "SH", "PP", "TP", "RS", "RE", "ad", "nf", "nh", "fi"}


def run(*words, **options):
    return subprocess.run(words, capture_output=True, text=True, check=True, **options).stdout


def script(shell):
    return run(PROGRAM, "completion", shell)


def manual(command):
    return run(PROGRAM, "manual", command)


def commands():
    """The commands that --help lists."""
    text = run(PROGRAM, "--help", env={**os.environ, "COLUMNS": "80"})
    return re.findall(r"^  ([a-z]+) {3,}", text.split("Subcommands:")[-1], re.M)


def flags(command):
    """The long flags that a command's --help lists."""
    text = run(PROGRAM, command, "--help")
    names = [re.split(r" {2,}", line.strip())[0] for line in text.splitlines() if line.startswith("  -")]
    return set(re.findall(r"--[a-z][a-z0-9-]+", " ".join(names)))


class Bash(unittest.TestCase):
    def completed(self, *words):
        """What bash offers for the last of these words."""
        line = " ".join(f"'{word}'" for word in words)
        text = f"{script('bash')}\nCOMP_WORDS=({line})\nCOMP_CWORD={len(words) - 1}\n_semitone\n((${{#COMPREPLY[@]}} == 0)) || printf '%s\\n' \"${{COMPREPLY[@]}}\""
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "a folder").mkdir()
            (pathlib.Path(folder) / "file.pt").touch()
            return run("bash", "--norc", "-c", text, cwd=folder).splitlines()

    def test_commands(self):
        self.assertEqual(self.completed("semitone", "tr"), ["train"])
        self.assertEqual(self.completed("semitone", "--ver"), ["--version"])
        self.assertLessEqual({"train", "launch", "doctor", "completion"}, set(self.completed("semitone", "")))

    def test_every_flag_of_every_command(self):
        self.assertGreater(len(commands()), 9)
        for command in commands():
            with self.subTest(command):
                self.assertLessEqual(flags(command), set(self.completed("semitone", command, "--")))

    def test_values(self):
        self.assertEqual(self.completed("semitone", "train", "--opt-level", ""), ["O0", "O1", "O2", "O3", "all"])
        self.assertEqual(self.completed("semitone", "train", "--opt-level", "=", "a"), ["all"])
        self.assertEqual(self.completed("semitone", "train", "--opt-level", "="), ["O0", "O1", "O2", "O3", "all"])
        self.assertEqual(self.completed("semitone", "train", "--loss-scale", ""), ["auto", "dynamic"])
        self.assertEqual(set(self.completed("semitone", "train", "--data", "")), {"a folder", "file.pt"})
        self.assertEqual(self.completed("semitone", "train", "--save-weights", "f"), ["file.pt"])
        self.assertEqual(self.completed("semitone", "train", "--epochs", ""), [])
        self.assertEqual(self.completed("semitone", "train", "--save-every", ""), [])
        self.assertEqual(self.completed("semitone", "launch", "--tee", ""), ["0", "1", "2", "3"])
        self.assertEqual(self.completed("semitone", "bench", "res"), ["resnet50"])
        self.assertEqual(self.completed("semitone", "convert", "f"), ["file.pt"])

    def test_that_an_unknown_command_has_nothing(self):
        self.assertEqual(self.completed("semitone", "tarin", ""), [])


class Zsh(unittest.TestCase):
    def expect(self, line, pattern):
        """A zsh in a terminal of its own lists, after this line and a tab, something that the pattern describes."""
        with tempfile.TemporaryDirectory() as folder:
            (pathlib.Path(folder) / "_semitone").write_text(script("zsh"))
            text = r"""zmodload zsh/zpty
zpty shell zsh -f -i
zpty -w shell "PROMPT=; fpath=($1 \$fpath); autoload -Uz compinit; compinit -u -D; LISTMAX=10000"
zpty -w shell "bindkey '^I' list-choices; print rea''dy"
zpty -r -m shell answer "*ready*"
zpty -w -n shell "$2"$'\t'
zpty -r -m shell answer "$3" && print found"""
            environment = {**os.environ, "TERM": "dumb", "COLUMNS": "200", "LINES": "400"}
            self.assertIn("found", run("zsh", "-f", "-c", text, "zsh", folder, line, pattern, env=environment, timeout=60))

    def test_commands_and_values(self):
        self.expect("semitone ", "*doctor*train*")
        self.expect("semitone train --opt-level ", "*O0*O1*O2*O3*all*")
        self.expect("semitone report --", "*--compare*--html*")


class Fish(unittest.TestCase):
    def completed(self, line):
        text = f"{script('fish')}\ncomplete -C '{line}'"
        return {entry.split("\t")[0] for entry in run("fish", "--no-config", "-c", text).splitlines()}

    def test_commands_and_values(self):
        self.assertIn("train", self.completed("semitone tr"))
        self.assertEqual(self.completed("semitone train --opt-level "), {"O0", "O1", "O2", "O3", "all"})
        self.assertLessEqual(flags("report"), self.completed("semitone report --"))


class Manual(unittest.TestCase):
    def test_pages_have_what_man_expects(self):
        for command in ["semitone", *commands()]:
            with self.subTest(command):
                page = manual(command)
                name = "SEMITONE" if command == "semitone" else f"SEMITONE-{command.upper()}"
                self.assertTrue(page.startswith(f".TH {name} 1"), page[:40])
                for section in ["NAME", "SYNOPSIS", "OPTIONS", "EXIT STATUS"]:
                    self.assertEqual(page.count(f".SH {section}\n"), 1, section)
                for line in page.splitlines():
                    self.assertFalse(line.startswith("'"), line)
                    if line.startswith("."):
                        self.assertIn(line[1:].split(" ")[0], MACROS, line)

    def test_pages_have_every_flag(self):
        for command in commands():
            page = manual(command).replace("\\-", "-")
            for flag in flags(command):
                self.assertIn(f"\\fB{flag}\\fR", page, command)

    def test_the_program_lists_its_commands(self):
        page = manual("semitone").replace("\\-", "-")
        for command in commands():
            self.assertIn(f"semitone-{command}(1)", page)


class Groff(unittest.TestCase):
    def test_that_groff_has_no_warning(self):
        for command in ["semitone", *commands()]:
            with self.subTest(command):
                done = subprocess.run(["groff", "-man", "-Kutf8", "-Tutf8", "-ww"], input=manual(command), capture_output=True, text=True)
                self.assertEqual((done.stderr, done.returncode), ("", 0))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], "-v", *(sys.argv[1:] or ["Bash", "Manual"])])
