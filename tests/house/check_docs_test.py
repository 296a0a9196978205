"""That tools/check_docs.py and tools/doc_snippets.py accept this repository's pages and find each kind of violation, and the parts of
tools/docs.py that need neither Doxygen nor Zensical."""
import argparse
import importlib.util
import pathlib
import stat
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = None  # set from the command line


sys.path.insert(0, str(ROOT / "tools"))  # docs.py imports check_docs.py


def load(name):
    spec = importlib.util.spec_from_file_location(name.replace("/", "_"), ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_docs = load("check_docs")
doc_snippets = load("doc_snippets")
docs = load("docs")
filter_ = load("docs/filter")

HELP = """#!/bin/sh
[ "$1" = train ] || [ "$1" = launch ] || exit 1
echo '  --epochs N  -n N'
"""


def problems_of(text, **files):
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder).resolve()
        (root / "docs").mkdir()
        (root / "README.md").write_text(text)
        (root / "Makefile").write_text("test: build\nmnist-ddp: program\n")
        (root / "docs/a.md").write_text("# Title\n## `step()`, and after\n```sh\n# not a heading\n```\n")
        program = root / "semitone"
        program.write_text(HELP)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        return check_docs.check(root, program)


def shell(line):
    return problems_of(f"```sh\n{line}\n```\n")


class CheckDocs(unittest.TestCase):
    def test_this_repository_is_in_order(self):
        self.assertIsNotNone(PROGRAM)
        self.assertEqual(check_docs.check(ROOT, PROGRAM), [])

    def test_tables_of_options_are_those_of_the_class(self):
        header = "class LossScaleOptions {\n  LossScaleOptions& factor(double value);\n  LossScaleOptions& on(bool value);\n" \
                 " private:\n  double factor_ = 0x1p-2;\n  bool on_ = true;\n};\n"
        def problems(*rows):
            with tempfile.TemporaryDirectory() as folder:
                root = pathlib.Path(folder)
                for name, text in [("docs/a.md", "| option | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n"), ("h.h", header)]:
                    (root / name).parent.mkdir(exist_ok=True)
                    (root / name).write_text(text)
                return check_docs.check_option_table(root, "docs/a.md", ["option"], "h.h", "LossScaleOptions")
        factor, on = "| `factor` | 2^-2 | a \\| b |", "| `on` | true | |"
        self.assertEqual(problems(factor, on), [])
        self.assertEqual(problems("| `factor`, `on` | as before | |"), [])
        self.assertEqual(problems(factor), ["docs/a.md: option 'on' has no row"])
        self.assertEqual(problems(factor, on, "| `off` | 1 | |"), ["docs/a.md: there is no option 'off'"])
        self.assertEqual(problems("| `factor` | 0.5 | |", on), ["docs/a.md: 'factor' has the default 0x1p-2, the table says 0.5"])

    def test_the_navigation_lists_each_page_once(self):
        def problems(*listed):
            with tempfile.TemporaryDirectory() as folder:
                root = pathlib.Path(folder)
                for name in ("README.md", "docs/a.md", "tools/docs/mkdocs.yml"):
                    (root / name).parent.mkdir(parents=True, exist_ok=True)
                    (root / name).touch()
                (root / check_docs.NAVIGATION).write_text("nav:\n  - Start:\n" + "".join(f"      - A title: {page}\n" for page in listed))
                return check_docs.check_navigation(root)
        self.assertEqual(problems("README.md", "api/index.html", "docs/a.md"), [])
        self.assertEqual(problems("README.md"), ["tools/docs/mkdocs.yml: page 'docs/a.md' is not listed"])
        self.assertEqual(problems("README.md", "docs/a.md", "docs/b.md"), ["tools/docs/mkdocs.yml: there is no page 'docs/b.md'"])
        self.assertEqual(problems("README.md", "docs/a.md", "docs/a.md"), ["tools/docs/mkdocs.yml: page 'docs/a.md' is listed twice"])

    def test_messages_are_those_of_the_sources(self):
        source = 'Error("amp.scaler", "a \\"scale\\" above "\n    "0", fmt::format("{} in group {}", a, b), "set it"); Error("comm." + name, "ranks", "none");'
        def problems(message):
            with tempfile.TemporaryDirectory() as folder:
                root = pathlib.Path(folder)
                for name, text in [(check_docs.MESSAGES, f"| message | cause |\n|---|---|\n| `{message}` | why |\n"), ("src/a.cpp", source)]:
                    (root / name).parent.mkdir(exist_ok=True)
                    (root / name).write_text(text)
                return check_docs.check_messages(root)
        for message in ('[amp.scaler] expected a "scale" above 0, got … in group …', "[comm.send] expected ranks, got none", "… in group …"):
            with self.subTest(message):
                self.assertEqual(problems(message), [])
        for message in ("[amp.scaler] expected a scale above 0, got …", "[amp.other] expected ranks, got none", "…", "above 0 in group"):
            with self.subTest(message):
                self.assertEqual(len(problems(message)), 1)

    def test_rows_of_the_migration_page_have_examples(self):
        def problems(call, examples):
            with tempfile.TemporaryDirectory() as folder:
                root = pathlib.Path(folder)
                page = f"| Python | Semitone (C++) | example |\n|---|---|---|\n| `f()` | {call} | {examples} |\n"
                for name, text in [(check_docs.MIGRATION, page), ("examples/CMakeLists.txt", "foreach(example a)"),
                                   ("examples/a.cpp", '// semitone launch a\nmixed.scale_loss(loss).backward(); SEMITONE_CHECK; Options().policy(p);'),
                                   ("examples/b.cpp", "mixed.scale_loss(loss);"), ("tests/c.cpp", "f();")]:
                    (root / name).parent.mkdir(exist_ok=True)
                    (root / name).write_text(text)
                return check_docs.check_migration(root)
        link = "[a.cpp](../examples/a.cpp)"
        for call in ("`mixed.scale_loss(loss).backward()`", "`amp::Options::policy`, `backward`", '`scale_loss("other(x)")`', "`semitone launch -n 2 b`", "`SEMITONE_CHECK=full`"):
            with self.subTest(call):
                self.assertEqual(problems(call, link), [])
        self.assertEqual(problems("no equivalent: none of `g()` is needed", ""), [])
        for call, examples in [("`mixed.scale_loss(loss)`", ""), ("`scale`", link), ("`mixed.step(x)`", link), ("`amp::Options::level`", link), ("`semitone report`", link),
                               ("`scale_loss`", "[b.cpp](../examples/b.cpp)"), ("`f`", "[c.cpp](../tests/c.cpp)"), ("`scale_loss`", "[d.cpp](../examples/d.cpp)")]:
            with self.subTest(call):
                self.assertEqual(len(problems(call, examples)), 1)
        self.assertTrue(problems("`f`", "")[0].startswith("docs/migration.md:3: "))
        tables = check_docs.MIGRATION_TABLE.findall((ROOT / check_docs.MIGRATION).read_text())
        self.assertGreater(sum(len(rows.splitlines()) for rows in tables), 200)

    def test_examples_are_listed_and_their_counterparts_name_them(self):
        def problems(text, example="a.cpp", linked=("a.cpp", "b.cpp", "python/a.py")):
            with tempfile.TemporaryDirectory() as folder:
                root = pathlib.Path(folder)
                (root / "docs").mkdir()
                (root / "examples/python").mkdir(parents=True)
                (root / "examples/python/a.py").write_text(text)
                (root / "examples" / example).write_text("")
                (root / check_docs.EXAMPLES).write_text("".join(f"[a](../examples/{file})\n" for file in linked))
                return check_docs.check_examples(root)
        right = '"""As ../a.cpp."""\nprint(1)\n'
        self.assertEqual(problems(right), [])
        for text, example in [('"""As ../b.cpp."""\n', "a.cpp"), ("print(1)\n", "a.cpp"), (right, "b.cpp"), (right + "if\n", "a.cpp")]:
            with self.subTest(text):
                self.assertEqual(len(problems(text, example)), 1)
        self.assertEqual(len(problems(right, linked=["python/a.py"])), 1)
        self.assertEqual(len(problems(right, linked=["a.cpp"])), 1)

    def test_links_lead_to_files_and_headings(self):
        for link in ("docs/a.md", "docs/a.md#title", "docs/a.md#step-and-after", "https://example.org/x", "docs"):
            with self.subTest(link):
                self.assertEqual(problems_of(f"[a]({link})"), [])
        for link in ("docs/b.md", "docs/a.md#other", "docs/a.md#not-a-heading", "../elsewhere", "#nowhere"):
            with self.subTest(link):
                self.assertEqual(len(problems_of(f"\n[a]({link})")), 1)
        self.assertTrue(problems_of("\n\n[a](docs/b.md)")[0].startswith("README.md:3: "))

    def test_commands_exist(self):
        for line in ("make test ARGS=x  # why", "PRESET=debug make mnist-ddp", "./semitone train --epochs 3", "# nothing", "cmake -S . -B b",
                     "semitone launch -n 2 semitone train --epochs=3", "semitone launch --epochs 2 their_program --flags"):
            with self.subTest(line):
                self.assertEqual(shell(line), [])
        for line in ("make tset", "./semitone trian", "./semitone train --epoch 3", "semitone launch --nproc 2 a",
                     "semitone launch -n 2 semitone train --epoch 3", "build/release/benchmarks/none_bench", "apt-get install x"):
            with self.subTest(line):
                self.assertEqual(len(shell(line)), 1)


class Snippets(unittest.TestCase):
    def test_blocks_follow_each_other_in_one_function(self):
        text = "a\n```cpp\n#include <x.h>\nint a;\n```\n```sh\nls\n```\n```cpp\na = 1; …\n```\n"
        self.assertEqual(doc_snippets.blocks_of(text), [(3, "#include <x.h>\nint a;\n"), (10, "a = 1; \n")])

    def test_every_block_of_the_pages_is_in_the_source(self):
        source = doc_snippets.source_of(ROOT)
        blocks = sum(page.read_text().count("\n```cpp\n") for page in doc_snippets.pages(ROOT))
        self.assertGreater(blocks, 0)
        self.assertEqual(source.count("\n#line "), blocks)


class Site(unittest.TestCase):
    def test_links_of_a_page_lead_to_pages_and_to_the_reference(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            self.addCleanup(setattr, docs, "ROOT", docs.ROOT)
            docs.ROOT = root

            class Reference:
                headers = {root / "include/error.h": "error_8h.html"}
                names = {"semitone::Error": "classError.html"}
                place = docs.Reference.place

            (root / "docs").mkdir()
            (root / "run.sh").write_text("exit 1\n")
            (root / "docs/a.md").write_text("# `semitone::Error`\n[a](b.md#names), [b](../include/error.h), [c](../run.sh), [d](#x), [e](mailto:x) "
                                            "`semitone::Error` and `std::string`\n```cpp\n[f](../run.sh) `semitone::Error`\n```\n")
            written = {}
            pages = docs.Pages(Reference(), root)
            pages.write = lambda page, text: written.__setitem__(str(page), text)
            pages.add(root / "docs/a.md")
        self.assertEqual(written["docs/a.md"], "# `semitone::Error`\n[a](b.md#names), [b](../api/error_8h.html), [c](../run.sh.md), [d](#x), "
                         "[e](mailto:x) [`semitone::Error`](../api/classError.html) and `std::string`\n"
                         "```cpp\n[f](../run.sh) `semitone::Error`\n```\n")
        self.assertIn("exit 1\n", written["run.sh.md"])

    def test_a_link_of_the_site_that_leads_nowhere_is_found(self):
        with tempfile.TemporaryDirectory() as folder:
            site = pathlib.Path(folder).resolve()
            (site / "sub").mkdir()
            (site / "sub/b.html").write_text("<h1 id='there'>b</h1>")
            good = ["sub/b.html", "sub/b.html#there", "#here", "https://example.org", "mailto:x"]
            bad = ["sub/c.html", "sub/b.html#nowhere", "#nowhere", "sub"]
            (site / "a.html").write_text("<p id=\"here\">" + "".join(f'<a class="x" href="{link}">' for link in good))
            self.assertEqual(list(docs.broken_links(site)), [])
            (site / "a.html").write_text("".join(f'<a href="{link}">' for link in bad))
            self.assertEqual(len(list(docs.broken_links(site))), len(bad))

    def test_a_page_and_a_header_that_the_site_lacks_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder).resolve()
            self.addCleanup(setattr, docs, "ROOT", docs.ROOT)
            docs.ROOT = root
            site = root / "site"
            for name in ("README.md", "docs/a.md", "SECURITY.md", "THIRD_PARTY.md", "include/semitone/amp/b.h", "include/semitone/amp/detail/c.h"):
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).touch()
            for name in ("index.html", "docs/a.html", "SECURITY.html", "THIRD_PARTY.html", "api/b_8h.html"):
                (site / name).parent.mkdir(parents=True, exist_ok=True)
                (site / name).touch()

            class Reference:
                headers = {root / "include/semitone/amp/b.h": "b_8h.html"}

            self.assertEqual(list(docs.missing(site, Reference())), [])
            (site / "docs/a.html").unlink()
            (site / "api/b_8h.html").unlink()
            self.assertEqual(list(docs.missing(site, Reference())), ["docs/a.md: expected a page of the site, got none",
                                                                    "include/semitone/amp/b.h: expected a page of the reference, got none"])

    def test_doxygen_sees_the_comment_of_a_file_and_links_to_pages(self):
        header = "#pragma once\n\n/// About the file.\n\n#include <a.h>\n\n/// See docs/launch.md, as after optimizer.step().\n///\n///     docs/launch.md\nint a;\n"
        self.assertEqual(filter_.filtered(header), "#pragma once\n\n/// @file\n/// About the file.\n\n#include <a.h>\n\n"
                         "/// See [docs/launch.md](../docs/launch.html), as after %optimizer.step().\n///\n///     docs/launch.md\nint a;\n")
        self.assertEqual(filter_.filtered("#pragma once\n\n/// Of a.\nint a;\n\n"), "#pragma once\n\n/// Of a.\nint a;\n\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--program", type=pathlib.Path, required=True)
    options, rest = parser.parse_known_args()
    PROGRAM = options.program
    unittest.main(argv=[sys.argv[0], *rest])
