"""That tools/docs.py makes the whole site: its pages, its reference of the public headers, and links that lead somewhere."""
import html
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import docs  # noqa: E402


class Site(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(cls.folder.cleanup)
        cls.site = pathlib.Path(cls.folder.name).resolve() / "site"
        cls.made = subprocess.run([sys.executable, ROOT / "tools/docs.py", "--output", cls.site], capture_output=True, text=True)

    def test_it_is_made_without_a_problem(self):
        self.assertEqual(self.made.returncode, 0, self.made.stdout + self.made.stderr)

    def test_every_page_is_there_with_its_title(self):
        for page in [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]:
            with self.subTest(page.name):
                made = self.site / ("index.html" if page.name == "README.md" else page.relative_to(ROOT).with_suffix(".html"))
                title = page.read_text().splitlines()[0].removeprefix("# ").replace("`", "")
                headings = re.findall(r"<h1[^>]*>(.*?)<a", made.read_text(), re.S)
                self.assertIn(title, [html.unescape(re.sub(r"<[^>]*>", "", heading)).strip() for heading in headings])

    def test_every_public_header_is_in_the_reference(self):
        titles = {title for page in self.site.glob("api/*_8h.html")
                  for title in re.findall(r"<title>[^<]*?(semitone/[\w/]+\.h) File Reference</title>", page.read_text())}
        headers = {str(header.relative_to(ROOT / "include")) for header in (ROOT / "include/semitone").rglob("*.h") if "detail" not in header.parts}
        self.assertGreater(len(headers), 50)
        self.assertEqual(headers - titles, set())

    def test_every_link_leads_to_a_page_and_an_anchor_of_it(self):
        links = sum(len(docs.ATTRIBUTE.findall(page.read_text())) for page in self.site.rglob("*.html"))
        self.assertGreater(links, 10000)
        self.assertEqual(list(docs.broken_links(self.site)), [])


if __name__ == "__main__":
    unittest.main()
