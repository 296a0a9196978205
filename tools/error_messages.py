#!/usr/bin/env python3
"""Writes docs/error_messages.md: the messages of all errors that the sources throw, with what to do.

    tools/error_messages.py [--check] [ROOT]

An error is constructed as Error(component, expected, got, remedy), or as a class derived from Error. The texts are read as far as they
are literals: those of constants, of local variables and of functions that return one expression, and the arguments of fmt::format and
c10::str. "…" stands for everything else. If a function throws what its caller passes, such as fail(expected, got), each of its calls is a
message. With --check the page is compared, and not written; exits with 1 if it differs.
"""
import argparse
import itertools
import pathlib
import re
import sys
import textwrap
from typing import NamedTuple

PAGE = "docs/error_messages.md"
CAUSES = "docs/troubleshooting.md"
FOLDERS = ("include", "src", "apps")
PROGRAM = "apps"  # stands for a room
PREFIXES = {"autocast": "amp.", "scaling": "amp.", "recompute": "nn.", "c": "semitone_", PROGRAM: "cli."}  # of components; else the room
UNKNOWN = "…"
NOTHING_KNOWN = [(UNKNOWN, {})]
MOST_ALTERNATIVES = 8  # of one text: what has more is unknown
MOST_CALLERS = 4       # levels of functions that pass a text on
MOST_STEPS = 12        # from an expression to the texts that it is made of
MOST_COMBINATIONS = 256  # of the alternatives of several texts

TEXT = r'"(?:[^"\\\n]|\\.)*"'
LITERAL = re.compile(TEXT)
LITERALS = re.compile(rf"{TEXT}(?:\s*{TEXT})*")
# What a scan of C++ must not look into. A raw string has no delimiter here.
OPAQUE = re.compile(rf"R\"\(.*?\)\"|{TEXT}|'(?:[^'\\\n]|\\.)'|//[^\n]*|/\*.*?\*/", re.S)
SPECIAL = re.compile(rf"{OPAQUE.pattern}|[()\[\]{{}},+?:]", re.S)  # what walk() stops at
FIELD = re.compile(r"\{\{|\{(\d*)(?::[^{}]*(?:\{\}[^{}]*)?)?\}|\}\}")  # of fmt::format
CALL = re.compile(r"((?:\w+::)*\w+)\s*([({])")
NOT_FUNCTIONS = {"if", "for", "while", "switch", "catch", "return", "constexpr", "requires"}
CONSTANT = re.compile(rf"\bconstexpr (?:auto|const char\*|std::string_view|Variable) (\w+)\s*[={{]\s*({LITERALS.pattern})")


def without_comments(text):
    return OPAQUE.sub(lambda found: found.group(0) if found.group(0)[0] in "\"'R" else re.sub(r"[^\n]", " ", found.group(0)), text)


def walk(text, start=0):
    """(place, character) of brackets and separators outside of literals."""
    for found in SPECIAL.finditer(text, start):
        if len(found.group(0)) == 1:
            yield found.start(), found.group(0)


def closing(text, start):
    """The place behind the bracket that closes the one at start."""
    depth = 0
    for place, character in walk(text, start):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place + 1
    return len(text)


def split(text, separator):
    """The parts between separators that are in no brackets: "," or "+"."""
    parts, start, depth = [], 0, 0
    for place, character in walk(text):
        depth += (character in "([{") - (character in ")]}")
        if character == separator and depth == 0 and text[place:place + 2] != "++" and text[place - 1:place + 1] != "++":
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in [*parts, text[start:]]]


def ternary(text):
    """(condition, if true, if false) of a conditional expression; None for another one."""
    question, depth, nested = None, 0, 0
    for place, character in walk(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character == "?":
            nested += question is not None
            question = place if question is None else question
        elif depth == 0 and question is not None and character == ":" and ":" not in (text[place - 1], text[place + 1:place + 2]):
            if nested == 0:
                return text[:question], text[question + 1:place], text[place + 1:]
            nested -= 1
    return None


def together(parts):
    """Each combination of alternatives that can be at the same time: (texts, conditions)."""
    for choice in itertools.islice(itertools.product(*parts), MOST_COMBINATIONS):
        conditions = {}
        if all(conditions.setdefault(condition, value) == value for _, when in choice for condition, value in when.items()):
            yield [text for text, _ in choice], conditions


def joined(parts):
    return [("".join(texts), conditions) for texts, conditions in together(list(parts))]


def arguments_of(text, opening):
    inner = text[opening + 1:closing(text, opening) - 1]
    return split(inner, ",") if inner.strip() else []


class Function(NamedTuple):
    name: str
    parameters: list  # names
    texts: set        # those of them that are texts
    defaults: list    # expressions, "" where there is none
    least: int        # number of arguments without those that have a default
    place: int        # of the name, or of a lambda's variable
    start: int        # of the body
    end: int
    is_lambda: bool
    is_member: bool   # defined outside of its class


class Source:
    def __init__(self, root, path):
        self.path = path
        self.is_header = path.suffix in (".h", ".cuh")
        parts = path.relative_to(root).parts
        self.room = PROGRAM if parts[0] == "apps" else parts[2] if parts[0] == "include" else parts[1]
        self.text = without_comments(path.read_text())
        self.functions = list(self.find_functions())
        self.constants = {found.group(1): found.group(2) for found in CONSTANT.finditer(self.text) if not self.enclosing(found.start())}

    def find_functions(self):
        for place, character in walk(self.text):
            if character != "{":
                continue
            head = re.search(r"\)\s*(?:const|noexcept|override|mutable|->\s*[\w:<>&*, ]+|\s)*$", self.text[max(0, place - 2000):place])
            if head:
                function = self.function_before(max(0, place - 2000) + head.start(), place)
                if function:
                    yield function

    def function_before(self, closing_place, body):
        """The function whose parameters end at that bracket. A constructor's parameters stand before its initialisers."""
        opening = self.opening_of(closing_place)
        first = max(0, opening - 300)
        before = self.text[first:opening].rstrip()
        initialiser = re.search(r"(?<!:)[:,]\s*[\w:]+(?:<[^<>;]*>)?$", before)
        end = before[:initialiser.start()].rstrip() if initialiser else ""
        if end.endswith((")", "}")):
            return self.function_before(first + len(end) - 1, body)
        found = re.search(r"(\w+)(\s*=\s*\[[^\[\]]*\])?$", before)
        if not found or found.group(1) in NOT_FUNCTIONS:
            return None
        parameters = [parameter for parameter in arguments_of(self.text, opening) if parameter]
        defaults = [parameter.partition("=")[2].strip() for parameter in parameters]
        names = [(re.findall(r"\w+", parameter.partition("=")[0]) or [""])[-1] for parameter in parameters]
        texts = {name for name, parameter in zip(names, parameters) if re.search(r"std::string(?:_view)?\b|\bchar\*|\bauto\b", parameter)}
        return Function(found.group(1), names, texts, defaults, defaults.count(""), first + found.start(), body, closing(self.text, body),
                        bool(found.group(2)), before[:found.start()].endswith("::"))

    def opening_of(self, place):
        depth = 0
        for at in range(place, -1, -1):
            depth += (self.text[at] in ")]}") - (self.text[at] in "([{")
            if depth == 0:
                return at
        return 0

    def enclosing(self, place):
        """The functions around a place, the innermost first."""
        around = [function for function in self.functions if function.start < place < function.end]
        return sorted(around, key=lambda function: -function.start)


class Scope(NamedTuple):
    """Where an expression stands, and what the parameters around it are: their expressions, each with its own scope."""
    source: Source
    place: int
    bound: dict = {}


class Row(NamedTuple):
    room: str
    component: str
    expected: str
    got: str
    remedy: str
    kind: str

    @property
    def message(self):
        return f"[{self.component}] expected {self.expected}, got {self.got}"


class Reader:
    """Reads the errors of all sources."""

    def __init__(self, root):
        files = [file for folder in FOLDERS for file in sorted((root / folder).rglob("*")) if file.suffix in (".h", ".cpp", ".cu", ".cuh")]
        self.sources = [Source(root, file) for file in files]
        self.kinds = self.find_kinds()
        self.by_room, self.shared = {}, {}  # shared: constants of headers, by name and room
        for source in self.sources:
            self.by_room.setdefault(source.room, []).append(source)
            for name, value in source.constants.items() if source.is_header else []:
                self.shared.setdefault(name, {})[source.room] = value

    def find_kinds(self):
        """Error and the classes that derive from it, with the public class that each of them is for a user."""
        bases = dict(found for source in self.sources for found in re.findall(r"\bclass (\w+)(?: final)? : public (\w+) \{", source.text))
        kinds = {"Error": "Error"}
        while True:
            known = {name: name if base == "Error" else kinds[base] for name, base in bases.items() if base in kinds and name not in kinds}
            if not known:
                return kinds | {"UsageError": "Error"}  # of the program's command line
            kinds.update(known)

    # Texts of expressions: each that an expression may be, with the conditions under which it is that one.

    def texts(self, expression, scope, depth=0):
        found = {}
        for text, when in self.alternatives(expression.strip(), scope, depth):
            found.setdefault(re.sub(f"{UNKNOWN}(?: ?{UNKNOWN})+", UNKNOWN, text), when)
        return list(found.items()) if len(found) <= MOST_ALTERNATIVES else NOTHING_KNOWN

    def alternatives(self, expression, scope, depth):
        if depth > MOST_STEPS or not expression:
            return NOTHING_KNOWN
        if expression[0] == "(" and closing(expression, 0) == len(expression):
            return self.texts(expression[1:-1], scope, depth + 1)
        if LITERALS.fullmatch(expression):
            text = "".join(literal[1:-1] for literal in LITERAL.findall(expression))
            return [(re.sub(r"\\(.)", lambda found: " " if found.group(1) in "nt" else found.group(1), text), {})]
        if re.fullmatch(r"-?\d+(?:\.\d+)?", expression):
            return [(expression, {})]
        choice = ternary(expression)
        if choice:
            condition, *branches = (" ".join(part.split()) for part in choice)
            return [(text, {**when, condition: first}) for branch, first in zip(branches, (True, False))
                    for text, when in self.texts(branch, scope, depth + 1) if when.get(condition, first) == first]
        sum_ = split(expression, "+")
        if len(sum_) > 1:
            return joined(self.texts(part, scope, depth + 1) for part in sum_)
        expression = re.sub(r"\.(?:c_str|str|data)\(\)$|(?<=\w)\.name$", "", expression)
        call = CALL.match(expression)
        if call and closing(expression, call.end() - 1) == len(expression):
            return self.of_call(call.group(1), arguments_of(expression, call.end() - 1), scope, depth + 1)
        if re.fullmatch(r"(?:\w+::)*\w+", expression):
            return self.of_name(expression.rpartition("::")[2], scope, depth + 1)
        return NOTHING_KNOWN

    def of_call(self, name, arguments, scope, depth):
        if name == "fmt::format" and arguments:
            return self.formatted(arguments, scope, depth)
        if name == "c10::str":
            return joined(self.texts(argument, scope, depth) for argument in arguments)
        if name in ("std::string", "std::string_view", "std::move", "fmt::runtime") and len(arguments) == 1:
            return self.texts(arguments[0], scope, depth)
        functions = [] if "::" in name else self.named(name, scope.source, len(arguments))
        if len(functions) != 1:  # none, or overloads
            return NOTHING_KNOWN
        source, function = functions[0]
        returned = re.fullmatch(r"\{\s*return\s([^;]*);\s*\}", source.text[function.start:function.end])
        bound = {parameter: (argument, scope) for parameter, argument in zip(function.parameters, arguments)}
        found = self.texts(returned.group(1), Scope(source, function.start + 1, bound), depth) if returned else NOTHING_KNOWN
        return NOTHING_KNOWN if UNKNOWN in dict(found) else found  # it stands for the others too: nan, of a number

    def formatted(self, arguments, scope, depth):
        values = [self.texts(argument, scope, depth) for argument in arguments[1:]]
        found = []
        for pattern, when in self.texts(arguments[0], scope, depth):
            parts, end, following = [[("", when)]], 0, 0
            for field in FIELD.finditer(pattern):
                parts.append([(pattern[end:field.start()], {})])
                end = field.end()
                if field.group(0) in ("{{", "}}"):
                    parts.append([(field.group(0)[0], {})])
                    continue
                number = int(field.group(1) or following)
                following += 1
                parts.append(values[number] if number < len(values) else NOTHING_KNOWN)
            found += joined([*parts, [(pattern[end:], {})]])
        return found

    def of_name(self, name, scope, depth):
        if name in scope.bound:
            argument, callers = scope.bound[name]
            return self.texts(argument, callers, depth)
        value = self.local(name, scope) or scope.source.constants.get(name)
        if value is None:
            values = self.shared.get(name, {})
            value = values.get(scope.source.room) or (next(iter(values.values())) if len(values) == 1 else None)
        return self.texts(value, scope, depth) if value else NOTHING_KNOWN

    def local(self, name, scope):
        """The initial value of a local variable that nothing changes before the place."""
        for function in scope.source.enclosing(scope.place):
            text = scope.source.text[function.start:scope.place]
            declared = list(re.finditer(rf"\b(?:auto|char|std::string(?:_view)?)[*&]*\s+(?:const\s+)?{name}\s*(=|\(|\{{)", text))
            if not declared:
                continue
            start = declared[-1].end()
            if re.search(rf"\b{name}\s*(?:\+?=(?!=)|\.append|\.insert)", text[start:]):
                return None
            if declared[-1].group(1) == "=":
                return text[start:text.find(";", start)]
            return text[start:closing(text, start - 1) - 1]
        return None

    def named(self, name, source, arguments):
        """The functions that a source can call so: its own, or else those of its room."""
        for sources in ([source], self.by_room[source.room]):
            found = [(each, function) for each in sources for function in each.functions
                     if function.name == name and function.least <= arguments <= len(function.parameters)]
            if found:
                return found
        return []

    # Errors.

    def sites(self):
        """(scope, kind, arguments) of each error that is constructed."""
        pattern = re.compile(rf"(?<![\w:.])(?:semitone::)?({'|'.join(sorted(self.kinds))})\s*([({{])")
        for source in self.sources:
            for found in pattern.finditer(source.text):
                arguments = arguments_of(source.text, found.end() - 1)
                if len(arguments) >= 3 and not re.search(r"\bstd::string_view \w+$|\bconst std::string& \w+$", arguments[0]):
                    yield Scope(source, found.start()), self.kinds[found.group(1)], arguments

    def scopes(self, scope, expected, others, level=0):
        """The scopes in which to read the texts: those of the callers if one of the texts is their argument, or else the given one.

        A text that only begins with an argument is one too if it says what was expected.
        """
        first = [re.search(r"(?<![\w.>:])([a-z]\w*)(?![\w(:.])", OPAQUE.sub("", text)) for text in expected
                 if self.texts(text, scope)[0][0].startswith(UNKNOWN)]
        begins = {found.group(1) for found in first if found}
        names = begins | {text for text in [*expected, *others] if re.fullmatch(r"[a-z]\w*", text)}
        for function in scope.source.enclosing(scope.place):
            passed = names & function.texts - set(scope.bound)
            if level < MOST_CALLERS and passed:
                found = [inner for call in self.calls(scope.source, function)
                         for inner in self.bind(scope, function, call, passed & begins, passed - begins, level)]
                if found:
                    return found
        return [scope]

    def calls(self, source, function):
        """(scope, arguments) of the calls of a function: around a lambda, else where a member is declared, or in its source, or in its room."""
        pattern = re.compile(rf"(?<![\w:]){function.name}\s*\(")
        header = f'/{source.path.stem}.h"'
        around = source.enclosing(function.place)[:1] if function.is_lambda else []
        own = [other for other in self.by_room[source.room] if other is source or header in other.text] if function.is_member else [source]
        for sources in (own, self.by_room[source.room]):
            found = []
            for each in sources:
                for match in pattern.finditer(each.text, *((around[0].start, around[0].end) if around else ())):
                    arguments = arguments_of(each.text, match.end() - 1)
                    if function.least <= len(arguments) <= len(function.parameters) and not (each is source and match.start() == function.place):
                        found.append((Scope(each, match.start()), arguments))
            if found or around:
                return found
        return []

    def bind(self, scope, function, call, expected, others, level):
        """The scope with a call's arguments, once for each scope in which these are to be read."""
        caller, passed = call
        arguments = dict(zip(function.parameters, [*passed, *function.defaults[len(passed):]]))
        for inner in self.scopes(caller, [arguments[name] for name in sorted(expected)], [arguments[name] for name in sorted(others)], level + 1):
            yield scope._replace(bound={**scope.bound, **{name: (argument, inner) for name, argument in arguments.items()}})

    def rows(self):
        found = set()
        for scope, kind, arguments in self.sites():
            arguments = [*arguments, '""'][:4]
            for inner in self.scopes(scope, arguments[1:2], arguments[2:]):
                for (component, expected, got, remedy), _ in together([self.texts(argument, inner) for argument in arguments]):
                    if not re.match(r"[a-z]", component):
                        component = prefix_of(scope.source.room) + UNKNOWN
                    if re.search(r"[A-Za-z]{2}", expected):
                        found.add(Row(scope.source.room, component, expected, got, "" if remedy == UNKNOWN else remedy, kind))
        return merged(found)


def prefix_of(room):
    return PREFIXES.get(room, f"{room}.")


def merged(rows):
    """One row for those that differ in the component only, and for those that differ in the remedy only."""
    components, remedies = {}, {}
    for row in rows:
        components.setdefault(row._replace(component=""), set()).add(row.component)
    for row, names in components.items():
        parts = [name.split(".") for name in names]
        same = [part[0] for part in itertools.takewhile(lambda part: len(set(part)) == 1, zip(*parts))]
        name = ".".join(same) + ("" if len(names) == 1 else f".{UNKNOWN}") if same else prefix_of(row.room) + UNKNOWN
        remedies.setdefault(row._replace(component=name, remedy=""), set()).add(row.remedy)
    return [row._replace(remedy=", or: ".join(sorted(texts - {""}))) for row, texts in remedies.items()]


class Cause(NamedTuple):
    component: str  # "": any
    begins: bool    # the first text is the beginning of what was expected
    texts: list     # the fixed texts of the message, in their order
    section: str    # of the page, as an anchor


def causes_of(root):
    """The messages that docs/troubleshooting.md explains."""
    page = root / CAUSES
    section, found = "", []
    for line in page.read_text().splitlines() if page.exists() else []:
        if line.startswith("## "):
            section = re.sub(r"[^\w\- ]", "", line[3:].lower()).replace(" ", "-")
        for message in re.findall(r"`([^`]+)`", line.split("|")[1]) if line.startswith("| `") else []:
            component, expected, text = re.match(r"(?:\[([\w.]+)\] )?(expected )?(.*)", message).groups()
            texts = [part.strip() for part in re.split(r"…|, got\b", text) if re.search(r"\w{3}", part)]
            if texts:
                found.append(Cause(component or "", bool(expected) and text.startswith(texts[0]), texts, section))
    return found


def explained_in(row, causes):
    """The section of docs/troubleshooting.md that explains a message, or ""."""
    for cause in causes:
        places = [row.message.find(text) for text in cause.texts]
        if -1 not in places and places == sorted(places) and (not cause.begins or row.expected.startswith(cause.texts[0])) \
                and (not cause.component or row.component.rstrip(f".{UNKNOWN}") in cause.component):
            return cause.section
    return ""


def code(text):
    """As code in a cell of a table."""
    text = re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"


def prose(text):
    """Of a remedy in a cell: nothing in it is Markdown."""
    return re.sub(r"([\\`*<>|\[\]]|\b_)", r"\\\1", re.sub(r"\s+", " ", text).strip())


INTRODUCTION = """# Messages of errors

`tools/error_messages.py` writes this page from the sources, and the test `docs` compares it with them. It lists the
messages of errors, by the first word of their component, with what to do. "…" stands for what differs from case to
case, such as a name or a number. A few messages whose texts are put together in several places are missing.

[errors.md](errors.md) describes the classes of errors and what holds after one. [troubleshooting.md](troubleshooting.md)
explains the most frequent messages, which have the link "why" here, and warnings.
"""


def page_of(root):
    causes, groups = causes_of(root), {}
    for row in Reader(root).rows():
        groups.setdefault(re.match(r"[a-z_]+", row.component).group(0), []).append(row)
    contents = textwrap.fill(", ".join(f"[{name}](#{name})" for name in sorted(groups)), 120, break_long_words=False, break_on_hyphens=False)
    lines = [INTRODUCTION, contents]
    for name in sorted(groups):
        lines += ["", f"## {name}", "", "| message | what to do | class |", "|---|---|---|"]
        for row in sorted(groups[name], key=lambda row: (row.component, row.message, row.kind)):
            section = explained_in(row, causes)
            why = f"[why]({pathlib.Path(CAUSES).name}#{section})" if section else ""
            remedy = ". ".join(part for part in (prose(row.remedy), why) if part)
            lines.append(f"| {code(row.message)} | {remedy} | {'' if row.kind == 'Error' else f'`{row.kind}`'} |")
    return "\n".join(lines) + "\n"


def check(root):
    """Whether the page is what this tool would write."""
    page = root / PAGE
    if not page.exists() or page.read_text() == page_of(root):
        return []
    return [f"{PAGE}: expected the messages of the sources, got others: run tools/error_messages.py"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("root", nargs="?", default=pathlib.Path(__file__).parent.parent, type=pathlib.Path)
    options = parser.parse_args()
    root = options.root.resolve()
    if options.check:
        problems = check(root)
        print(*problems, f"{len(problems)} violations", sep="\n")
        return 1 if problems else 0
    (root / PAGE).write_text(page_of(root))
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
