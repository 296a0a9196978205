"""That tools/error_messages.py reads the texts of errors from C++, and makes the page of them."""
import pathlib
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import error_messages  # noqa: E402

ERRORS = "class FileError : public Error {};\nclass DamageError : public FileError {};\n"


def rows_of(text, **others):
    """(message, remedy, class) of a source of the room nn, with other files of that room."""
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, content in {"core/error.h": ERRORS, "nn/a.cpp": text, **{f"nn/{name.replace('__', '.')}": other for name, other in others.items()}}.items():
            (root / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            (root / "src" / name).write_text(content)
        return sorted((row.message, row.remedy, row.kind) for row in error_messages.Reader(root).rows())


def messages_of(text, **others):
    return [message for message, _, _ in rows_of(text, **others)]


class Texts(unittest.TestCase):
    def test_literals_and_their_sums(self):
        self.assertEqual(rows_of('void f() { throw Error("nn.f", "a \\"scale\\" "\n  "above 0", "x" + std::to_string(n) + " of y", "do it"); }'),
                         [('[nn.f] expected a "scale" above 0, got x… of y', "do it", "Error")])
        self.assertEqual(messages_of('void f() { throw Error("nn.f", c10::str("at most ", 3, " of ", n), fmt::format("{{{}}} in {:.3g} s, {}", a, b, "c")); }'),
                         ["[nn.f] expected at most 3 of …, got {…} in … s, c"])

    def test_comments_and_other_calls_are_no_errors(self):
        self.assertEqual(rows_of('// throw Error("nn.f", "a", "b");\nError(const Error& other);\nvoid f() { g("Error(a, b, c)"); c10::Error("x", "y", "z"); }'), [])

    def test_names_of_constants_variables_and_functions(self):
        text = 'constexpr auto kName = "nn.f";\nstd::string in(const char* path) { return " in \'" + std::string(path) + "\'"; }\n' \
               'void f() { const std::string what = "a tensor"; throw Error(kName, what + in(path), "none"); }\n' \
               'void g() { constexpr auto kName = "nn.g"; throw Error(kName, "a list", "none"); }'
        self.assertEqual(messages_of(text), ["[nn.f] expected a tensor in '…', got none", "[nn.g] expected a list, got none"])

    def test_a_variable_that_changes_is_not_known(self):
        self.assertEqual(messages_of('void f() { std::string got = "one"; got += more; throw Error("nn.f", "a list", got); }'), ["[nn.f] expected a list, got …"])

    def test_alternatives_belong_together(self):
        self.assertEqual(rows_of('void f() { throw Error("nn.f", "a list", good ? "one" : "none", good ? "" : "add one"); }'),
                         [("[nn.f] expected a list, got none", "add one", "Error"), ("[nn.f] expected a list, got one", "", "Error")])

    def test_a_function_that_throws_what_it_is_given_has_a_message_for_each_call(self):
        helper = 'void fail(const std::string& expected, std::string_view got) {\n  throw FileError("nn.f", expected + " in the file", got);\n}\n'
        self.assertEqual(rows_of(helper + 'void f() { fail("a list", "none"); fail("a number from " + std::to_string(n), text); }'),
                         [("[nn.f] expected a list in the file, got none", "", "FileError"), ("[nn.f] expected a number from … in the file, got …", "", "FileError")])
        # Through a second one, and a lambda, of which another function has one of the same name.
        text = helper + 'void f(const char* key) {\n  const auto require = [&](bool good, const char* expected) { if (!good) fail(expected, "none"); };\n' \
                        '  require(x, "a key");\n}\nvoid g() { const auto require = [](bool good, int number) {}; require(y, 3); }'
        self.assertEqual(messages_of(text), ["[nn.f] expected a key in the file, got none"])

    def test_a_name_within_a_text_is_no_message_of_its_own(self):
        text = 'void read(const char* key) { throw Error("nn.f", std::string("a number for \'") + key + "\'", "none"); }\nvoid f() { read("a"); read("b"); }'
        self.assertEqual(messages_of(text), ["[nn.f] expected a number for '…', got none"])

    def test_the_class_is_the_public_one(self):
        self.assertEqual(rows_of('void f() { throw DamageError("nn.f", "a file", "none"); }'), [("[nn.f] expected a file, got none", "", "FileError")])

    def test_components_that_are_not_known_or_differ(self):
        self.assertEqual(messages_of('void f(const char* component) { throw Error(component, "a list", "none"); }'), ["[nn.…] expected a list, got none"])
        self.assertEqual(messages_of('void f() { throw Error("nn.f", "a list", "none"); }\nvoid g() { throw Error("nn.g", "a list", "none"); }'),
                         ["[nn.…] expected a list, got none"])


class Page(unittest.TestCase):
    def test_it_is_compared_with_the_sources_and_links_the_causes(self):
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder)
            for name, text in {"src/nn/a.cpp": 'void f() { throw Error("nn.f", "a list|of tensors", "none", "call f_(x)[0]"); }',
                               "docs/troubleshooting.md": "## The layers: `nn`\n\n| `[nn.f] expected a list…` | why | cure |\n", error_messages.PAGE: ""}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            self.assertEqual(len(error_messages.check(root)), 1)
            (root / error_messages.PAGE).write_text(error_messages.page_of(root))
            self.assertEqual(error_messages.check(root), [])
            self.assertIn("| `[nn.f] expected a list\\|of tensors, got none` | call f_(x)\\[0\\]. [why](troubleshooting.md#the-layers-nn) |  |\n",
                          (root / error_messages.PAGE).read_text())


if __name__ == "__main__":
    unittest.main()
