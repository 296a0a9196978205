#!/usr/bin/env python3
"""Checks what README.md and docs/ say against the project: links, anchors, the commands in shell blocks, and tables of options.

    tools/check_docs.py [--program build/release/apps/semitone] [ROOT]

A link within the project leads to a file that git would keep, an anchor to a heading of that page. A line of a shell block runs a target of
the Makefile, a command of the program with flags that its help lists, a benchmark or a program that the set-up installs. A table of
options, variables or flags has a row for each that the code has, no other, and the same default where that is a number or a boolean.
The navigation of the site (tools/docs/mkdocs.yml) lists each page once, and the messages of docs/troubleshooting.md are in the sources.
Each row of docs/migration.md links examples that run and have its names, or says why there is no equivalent. docs/examples.md links each
example, and its counterpart in examples/python, which parses and names it. docs/error_messages.md is what tools/error_messages.py makes
of the sources.
Without --program, flags are not looked at. Prints one line for each violation and exits with 1 if there is one.
"""
import argparse
import ast
import pathlib
import re
import shlex
import subprocess
import sys

import error_messages

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.*?) *$", re.M)
CODE_BLOCK = re.compile(r"^```.*?^```$", re.M | re.S)
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
ASSIGNMENT = re.compile(r"^[A-Z_]+=")
INSTALLED = {"cmake", "ctest", "git", "tar", "cd"}  # by tools/setup.sh, or before it
PACKAGE_MANAGERS = {"conan", "docker", "spack", "vcpkg"}  # of users


def pages(root):
    found = [root / "README.md", *sorted(root.glob("docs/*.md"))]
    return found + [page for page in (root / "CONTRIBUTING.md", root / "CHANGELOG.md") if page.exists()]


def anchor_of(heading):
    """As GitHub makes it: lower case, without punctuation, blanks as hyphens."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors_of(page):
    return {anchor_of(heading) for heading in HEADING.findall(CODE_BLOCK.sub("", page.read_text()))}


def line_of(text, offset):
    return text.count("\n", 0, offset) + 1


def check_links(root, page):
    text = page.read_text()
    visible = CODE_BLOCK.sub(lambda block: re.sub(r"[^\n]", " ", block.group(0)), text)
    for link in LINK.finditer(visible):
        target, _, anchor = link.group(1).partition("#")
        if re.match(r"[a-z]+:", target):
            continue  # elsewhere: not asked for by a test
        where = f"{page.relative_to(root)}:{line_of(text, link.start())}"
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or root not in [file, *file.parents]:
            yield f"{where}: expected a file of the project, got the link '{target}'"
        elif anchor and file.suffix == ".md" and anchor not in anchors_of(file):
            yield f"{where}: expected a heading of {file.relative_to(root)}, got the anchor '#{anchor}'"


class Commands:
    """What shell blocks may run."""

    def __init__(self, root, program):
        self.targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), re.M))
        self.root, self.program, self.helps = root, program, {}

    def help(self, command):
        """Its text; None if the program has no such command."""
        if command not in self.helps:
            done = subprocess.run([self.program, command, "--help"], capture_output=True, text=True)
            self.helps[command] = done.stdout if done.returncode == 0 else None
        return self.helps[command]

    def flags(self, command):
        text = self.help(command)
        return None if text is None else set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", text))

    def problem(self, line):
        words = [word for word in shlex.split(line, comments=True)]
        while words and ASSIGNMENT.match(words[0]):
            words.pop(0)
        if not words:
            return None
        name, arguments = words[0], words[1:]
        if name == "make":
            unknown = [word for word in arguments if not ASSIGNMENT.match(word) and word not in self.targets]
            return f"no target '{unknown[0]}' in the Makefile" if unknown else None
        if pathlib.Path(name).name == "semitone":
            return self.problem_of_program(arguments)
        if "benchmarks/" in name:
            benchmark = pathlib.Path(name).name
            return None if list(self.root.glob(f"benchmarks/**/{benchmark}*")) else f"no benchmark '{benchmark}'"
        return None if name in INSTALLED | PACKAGE_MANAGERS or any((folder / name).exists() for folder in (self.root, self.root / "tools/bundle")) else f"no program '{name}' that the project has or installs"

    def problem_of_program(self, arguments):
        if self.program is None or not arguments or arguments[0].startswith("-"):
            return None
        command, rest = arguments[0], arguments[1:]
        known = self.flags(command)
        if known is None:
            return f"no command '{command}' of the program"
        if command == "launch":  # behind the program come that program's flags
            return self.problem_of_launch(rest, known)
        unknown = [word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in known]
        return f"'semitone {command}' has no flag {unknown[0]}" if unknown else None

    def problem_of_launch(self, arguments, known):
        words = list(arguments)
        while words and words[0].startswith("-"):
            if words[0] not in known:
                return f"'semitone launch' has no flag {words[0]}"
            words = words[2:]  # a flag and its value
        if words and words[0] == "semitone":
            return self.problem_of_program(words[1:])
        return None


def check_commands(root, page, commands):
    text = page.read_text()
    for block in SHELL_BLOCK.finditer(text):
        start = line_of(text, block.start(1))
        for number, line in enumerate(block.group(1).splitlines()):
            problem = commands.problem(line)
            if problem:
                yield f"{page.relative_to(root)}:{start + number}: {problem}"


# The tables of options: page, the first cells of its tables' headers, and the header and class whose setters are the options.
OPTION_TABLES = [("docs/grad_scaler.md", ["option"], "include/semitone/scaling/loss_scale.h", "LossScaleOptions"),
                 ("docs/opt_levels.md", ["property", "option"], "include/semitone/amp/opt_level.h", "Options")]
VARIABLE_PAGES = ["docs/environment.md", "docs/launch.md"]
VARIABLES = "src/core/env.h"
MESSAGES = "docs/troubleshooting.md"
NAVIGATION = "tools/docs/mkdocs.yml"
FLAG_TABLE = ("docs/launch.md", "flag", "launch")


def rows_of(text, first_cell):
    """(names, default) of each row of the tables whose header begins with that cell; default is '' if its column has another name."""
    for table in re.finditer(rf"^\| {first_cell} \|(.*)\n\|[-|]+\n((?:\|.*\n)+)", text, re.M):
        column = "default" in table.group(1).split("|")[0]
        for row in table.group(2).splitlines():
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
            yield re.findall(r"`([^`]+)`", cells[0]), cells[1] if column else ""


def value_of(text):
    """A number or boolean as a number; None for anything else."""
    text = re.sub(r"^2\^(-?\d+)$", r"0x1p\1", text.strip())
    if text in ("true", "false"):
        return float(text == "true")
    try:
        return float.fromhex(text) if text.startswith("0x") else float(text)
    except ValueError:
        return None


def setters_of(header, name):
    """The setters of a class, and the texts of the initial values of their members."""
    body = re.search(rf"^class {name} .*?^}};", header, re.M | re.S).group(0)
    values = dict(re.findall(r"^  [\w:<>, ]+ (\w+)_ = (.*);", body, re.M))
    return {setter: values.get(setter, "") for setter in re.findall(rf"^  {name}& (\w+)\(", body, re.M)}


def differences(page, documented, real, what):
    return [*(f"{page}: {what} '{name}' has no row" for name in sorted(real - documented)),
            *(f"{page}: there is no {what} '{name}'" for name in sorted(documented - real))]


def check_option_table(root, page, first_cells, header, name):
    setters = setters_of((root / header).read_text(), name)
    rows = [row for first_cell in first_cells for row in rows_of((root / page).read_text(), first_cell)]
    problems = differences(page, {option for options, _ in rows for option in options}, set(setters), "option")
    for options, default in rows:
        for option in options:
            documented, real = value_of(default), value_of(setters.get(option, ""))
            if documented is not None and real is not None and documented != real:
                problems.append(f"{page}: '{option}' has the default {setters[option]}, the table says {default}")
    return problems


def check_tables(root, commands):
    problems = [problem for table in OPTION_TABLES if (root / table[0]).exists() for problem in check_option_table(root, *table)]
    if (root / VARIABLES).exists():
        real = set(re.findall(r'Variable k\w+\{\s*"(\w+)"', (root / VARIABLES).read_text()))
        documented = {name for page in VARIABLE_PAGES for name in re.findall(r"`([A-Z][A-Z0-9_]+)`", (root / page).read_text())}
        problems += [f"{VARIABLE_PAGES[0]}: variable '{name}' is not mentioned" for name in sorted(real - documented)]
    page, first_cell, command = FLAG_TABLE
    if commands.program and (root / page).exists():
        rows = rows_of((root / page).read_text(), first_cell)
        documented = {flag for names, _ in rows for text in names for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", text)}
        real = set(re.findall(r"^  (?:-\w,)?(--[\w-]+)", commands.help(command) or "", re.M)) - {"--help"}
        problems += differences(page, documented, real, "flag")
    return problems


def check_navigation(root):
    """Of the site: a page that it lacks cannot be found there, and one that is listed twice is in two places at once."""
    if not (root / NAVIGATION).exists():
        return []
    listed = re.findall(r"^ +- [^:#]+: (\S+\.md)$", (root / NAVIGATION).read_text(), re.M)
    existing = {str(page.relative_to(root)) for page in pages(root)} | {str(page.relative_to(root)) for page in root.glob("*.md")}
    return [*(f"{NAVIGATION}: page '{page}' is not listed" for page in sorted(existing - set(listed))),
            *(f"{NAVIGATION}: there is no page '{page}'" for page in sorted(set(listed) - existing)),
            *(f"{NAVIGATION}: page '{page}' is listed twice" for page in sorted(set(listed)) if listed.count(page) > 1)]


LITERALS = re.compile(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*')


def literals_of(text):
    """The texts in quotes, those side by side as one."""
    return [re.sub(r"\\(.)", r"\1", re.sub(r'"\s*"', "", literals)[1:-1]) for literals in LITERALS.findall(text)]


def parts_of(message):
    """(component or '', the fixed texts of a message): "…" stands for what differs from case to case."""
    component, rest = re.match(r"(?:\[([\w.]+)\] )?(.*)", message).groups()
    parts = [part.strip() for part in re.split(r"…|\bexpected |, got | — ", rest)]
    return component or "", [part for part in parts if re.search(r"\w{2}", part)]


def has_component(component, literals):
    """As it is, in brackets, or made of two texts: "comm." and a collective, "parallel.zero" and ".save"."""
    dots = [place.start() for place in re.finditer(r"\.", component)]
    if component in literals or any(literal.startswith(f"[{component}]") for literal in literals):
        return True
    return any(component[:dot + 1] in literals or (component[:dot] in literals and component[dot:] in literals) for dot in dots)


def check_messages(root):
    """A message whose words changed would be searched for in vain. All its words stand in one source."""
    if not (root / MESSAGES).exists():
        return []
    sources = [file for folder in ("include", "src", "apps", "cmake") for file in sorted((root / folder).rglob("*")) if file.suffix in (".h", ".cpp", ".cmake")]
    literals = [literals_of(source.read_text()) for source in sources]
    texts, known = ["\0".join(each) for each in literals], {literal for each in literals for literal in each}
    problems = []
    for names, _ in rows_of((root / MESSAGES).read_text(), "message"):
        for message in names:
            component, parts = parts_of(message)
            if component and not has_component(component, known):
                problems.append(f"{MESSAGES}: no source has the component '{component}'")
            if not parts or not any(all(part in text for part in parts) for text in texts):
                problems.append(f"{MESSAGES}: no source has the message '{message}'")
    return problems


MIGRATION = "docs/migration.md"
NO_EQUIVALENT = "no equivalent: "
MIGRATION_TABLE = re.compile(r"^\| [^|\n]+ \| Semitone \(C\+\+\) \|.*\n\|[-|]+\n((?:\|.*\n)+)", re.M)


def names_in(code):
    """The names in the code of a row that its examples must have: the last part of each qualified name, and each function that is called.

    Of a command line its first two words, of an environment variable the name.
    """
    if code.startswith("semitone "):
        return {" ".join(code.split()[:2])}
    if re.match(r"[A-Z_]+=", code):
        return {code.partition("=")[0]}
    code = re.sub(r'"[^"]*"', "", code)
    called = re.findall(r"(?:\b\w+::)*\b([a-zA-Z_]\w*) *\(", code)
    qualified = re.findall(r"(?:::|->|\.)([a-zA-Z_]\w*)(?![\w:])", re.sub(r"\bstd::\w+", "", code))
    return {*called, *qualified, *re.findall(r"^\w*[a-zA-Z_]\w*$", code)}


def check_migration_row(root, row, running):
    """Problems of one row: which examples it lacks, or which names they lack."""
    cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]]
    if len(cells) != 3:
        return [f"expected 3 cells, got {len(cells)}"]
    _, call, examples = cells
    if call.startswith(NO_EQUIVALENT):
        return []
    files = [target for target in re.findall(r"\]\(\.\./(examples/[^)#]+)\)", examples) if (root / target).is_file()]
    if not files:
        return [f"expected an example in the last cell, or '{NO_EQUIVALENT}' and the reason, got '{examples}'"]
    text = "\n".join((root / file).read_text() for file in files)
    names = sorted({name for code in re.findall(r"`([^`]+)`", call) for name in names_in(code)})
    return [*(f"expected an example that runs as a test, got '{file}'" for file in files
              if file.endswith(".cpp") and pathlib.Path(file).stem not in running),
            *(f"expected '{name}' in {', '.join(files)}, got none" for name in names if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text))]


def check_migration(root):
    """A row without an example of its call would be a promise that nothing tests."""
    page = root / MIGRATION
    if not page.exists():
        return []
    running = set(re.findall(r"\w+", (root / "examples/CMakeLists.txt").read_text()))
    text = page.read_text()
    return [f"{MIGRATION}:{line_of(text, table.start(1)) + number}: {problem}" for table in MIGRATION_TABLE.finditer(text)
            for number, row in enumerate(table.group(1).splitlines()) for problem in check_migration_row(root, row, running)]


EXAMPLES = "docs/examples.md"


def check_examples(root):
    page = root / EXAMPLES
    if not page.exists():
        return []
    linked = set(re.findall(r"\]\(\.\./(examples/[^)#]+)\)", page.read_text()))
    files = {str(file.relative_to(root)) for kind in ("*.cpp", "python/*.py") for file in root.glob(f"examples/{kind}")}
    found = [f"{EXAMPLES}: expected a link to {file}, got none" for file in sorted(files - linked)]
    for file in sorted(root.glob("examples/python/*.py")):
        name = f"examples/python/{file.name}"
        try:
            about = ast.get_docstring(ast.parse(file.read_text())) or ""
        except SyntaxError as error:
            found.append(f"{name}:{error.lineno}: {error.msg}")
            continue
        if f"../{file.stem}.cpp" not in about or not (root / f"examples/{file.stem}.cpp").exists():
            found.append(f"{name}: expected '../{file.stem}.cpp' in its first comment, and that file, got neither or one")
    return found


def check(root, program=None):
    commands = Commands(root, program)
    found = [problem for page in pages(root) for problem in [*check_links(root, page), *check_commands(root, page, commands)]]
    found += check_tables(root, commands) + check_navigation(root) + check_messages(root)
    return found + check_migration(root) + check_examples(root) + error_messages.check(root)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path)
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parent.parent, type=pathlib.Path)
    options = parser.parse_args()
    problems = check(options.root.resolve(), options.program and options.program.resolve())
    print(*problems, f"{len(problems)} violations", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
