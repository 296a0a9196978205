#!/usr/bin/env python3
"""Builds the site of the documentation into build/docs; `make docs` calls it, after tools/setup_docs.sh:

    tools/docs.py [--output DIR]

The pages are README.md, docs/ and their neighbours, by Zensical, the successor of Material for MkDocs. The reference is made from the
public headers by Doxygen. (Two tools, since Debian's Doxygen does not know the anchors of GitHub's Markdown.) Zensical gets the pages as
they are, except that links to public headers lead to the reference, links to other sources to a page that shows them, and names such as
`amp::GradScaler` become links to the reference. Errors are a warning of Doxygen, a link of the site that leads nowhere, and a page or a
public header that the site lacks. Intermediate files are beside the output, in DIR-work.
"""
import argparse
import html
import os
import pathlib
import re
import shutil
import subprocess
import sys
import urllib.parse
import xml.etree.ElementTree as ElementTree

from check_docs import LINK, pages

ROOT = pathlib.Path(__file__).resolve().parent.parent
SITE, TOOLS = ROOT / "build/docs", ROOT / ".deps/docs"
LANGUAGES = {".cpp": "cpp", ".h": "cpp", ".c": "c", ".py": "python", ".cs": "csharp", ".rs": "rust", ".java": "java", ".cmake": "cmake",
             "CMakeLists.txt": "cmake", ".toml": "toml", ".xml": "xml", ".csproj": "xml"}
FENCED = re.compile(r"^```.*?^```$", re.M | re.S)
CODE_SPAN = re.compile(r"(\]\([^)]*\)|\[[^\]]*\]\([^)]*\))|`((?:[a-z]\w*::)+\w+)(\(\))?`")


def make_reference(work):
    style = next(TOOLS.glob("lib/python*/site-packages/doxygen_awesome_css"))
    subprocess.run(["doxygen", "tools/docs/Doxyfile"], cwd=ROOT, check=True,
                   env={**os.environ, "DOCS_WORK": str(work), "DOCS_API": str(work / "pages/api"), "DOCS_STYLE": str(style)})
    return Reference(work / "api.tag")


class Reference:
    """Where the reference has a header or a name."""

    def __init__(self, tags):
        self.headers, self.names = {}, {}
        for compound in ElementTree.parse(tags).getroot():
            kind, name = compound.get("kind"), compound.findtext("name")
            if kind == "file":
                self.headers[pathlib.Path(compound.findtext("path"), name)] = compound.findtext("filename")
            elif kind in ("class", "struct"):
                self.names[name] = compound.findtext("filename")
            elif kind == "namespace":
                for member in compound.findall("member"):
                    anchor = f"{member.findtext('anchorfile')}#{member.findtext('anchor')}"
                    self.names.setdefault(f"{name}::{member.findtext('name')}", anchor)

    def place(self, name):
        """Of `amp::GradScaler`, for example, or None."""
        return self.names.get(f"semitone::{name}") or self.names.get(name)


class Pages:
    """Copies the pages, and whatever they link, into the folder that Zensical reads."""

    def __init__(self, reference, folder):
        self.reference, self.folder, self.shown = reference, folder, set()

    def relative(self, target, page):
        return os.path.relpath(target, page.parent)

    def link_of(self, target, page):
        """What leads from a page to the file or folder of that path; both paths are relative to the root."""
        header = self.reference.headers.get(ROOT / target)
        if header or target == pathlib.Path("include/semitone"):
            return self.relative(pathlib.Path("api", header or "index.html"), page)
        if target.suffix in (".md", ".png", ".svg"):
            return self.relative(target, page)
        self.show(target)
        return self.relative(target / "index.md" if (ROOT / target).is_dir() else f"{target}.md", page)

    def show(self, source):
        """Makes a page with a source, or a page with the list of a folder's sources."""
        if source in self.shown:
            return
        self.shown.add(source)
        if not (ROOT / source).is_dir():
            language = LANGUAGES.get(source.name) or LANGUAGES.get(source.suffix, "text")
            fence = "`" * 6
            self.write(pathlib.Path(f"{source}.md"), f"# {source.name}\n\n{fence}{language}\n{(ROOT / source).read_text()}{fence}\n")
            return
        page = source / "index.md"
        listed = subprocess.run(["git", "ls-files", "--cached", "--others", "--exclude-standard", source], cwd=ROOT, capture_output=True, text=True)
        files = sorted(listed.stdout.split()) if listed.returncode == 0 else \
            sorted(str(file.relative_to(ROOT)) for file in (ROOT / source).rglob("*") if file.is_file())  # not a checkout
        rows = [f"- [{pathlib.Path(file).relative_to(source)}]({self.link_of(pathlib.Path(file), page)})\n"
                for file in files if not file.endswith(".md") and (ROOT / file).is_file()]
        self.write(page, f"# {source}/\n\n{''.join(rows)}")

    def write(self, page, text):
        (self.folder / page).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / page).write_text(text)

    def add(self, page):
        path = page.relative_to(ROOT)

        def moved(link):
            target, hash_, anchor = link.group(1).partition("#")
            if not target or re.match(r"[a-z]+:", target):
                return link.group(0)
            place = self.link_of(pathlib.Path(os.path.relpath((page.parent / target).resolve(), ROOT)), path)
            return link.group(0)[:link.start(1) - link.start(0)] + place + hash_ + anchor + ")"

        def named(span):
            place = span.group(2) and self.reference.place(span.group(2))
            return f"[{span.group(0)}]({self.relative(pathlib.Path('api', place), path)})" if place else span.group(0)

        def prose(text):
            lines = LINK.sub(moved, text).splitlines(keepends=True)
            return "".join(line if line.startswith("#") else CODE_SPAN.sub(named, line) for line in lines)

        text, end, parts = page.read_text(), 0, []
        for block in FENCED.finditer(text):
            parts += [prose(text[end:block.start()]), block.group(0)]
            end = block.end()
        self.write(path, "".join([*parts, prose(text[end:])]))


def all_pages():
    return [*pages(ROOT), ROOT / "SECURITY.md", ROOT / "THIRD_PARTY.md"]


def stage(reference, folder):
    shutil.copytree(ROOT / "docs/figures", folder / "docs/figures")
    shutil.copy(ROOT / "tools/docs/site.css", folder)
    copies = Pages(reference, folder)
    for page in all_pages():
        copies.add(page)


def missing(site, reference):
    """The pages and the public headers that a site lacks."""
    for page in all_pages():
        path = page.relative_to(ROOT)
        if not (site / (path.with_suffix(".html") if path.name != "README.md" else "index.html")).is_file():
            yield f"{path}: expected a page of the site, got none"
    for header in sorted((ROOT / "include/semitone").rglob("*.h")):
        place = reference.headers.get(header)
        if "detail" not in header.parts and (place is None or not (site / "api" / place).is_file()):
            yield f"{header.relative_to(ROOT)}: expected a page of the reference, got none"


ATTRIBUTE = re.compile(r"""<[a-z]+\s[^>]*?\b(?:href|src)=["']([^"'<>\s]*)["']""")
ANCHOR = re.compile(r"""\b(?:id|name)=["']([^"']+)["']""")


def broken_links(site):
    """The links within a site that lead to no file, or to no anchor of it."""
    texts = {file: file.read_text() for file in site.rglob("*.html")}
    anchors = {}
    for file, text in sorted(texts.items()):
        for link in sorted(set(ATTRIBUTE.findall(re.sub(r"<script.*?</script>", "", text, flags=re.S)))):
            address = urllib.parse.urlsplit(html.unescape(link))
            if address.scheme or address.netloc or link == "#nested-classes":  # Doxygen links that even if the nested classes are private
                continue
            target = (file.parent / urllib.parse.unquote(address.path)).resolve() if address.path else file
            anchor = urllib.parse.unquote(address.fragment)
            if not (target / "index.html" if target.is_dir() else target).is_file():
                yield f"{file.relative_to(site)}: expected a file of the site, got the link '{link}'"
            elif anchor and target in texts:
                if target not in anchors:
                    anchors[target] = set(ANCHOR.findall(texts[target]))
                if anchor not in anchors[target]:
                    yield f"{file.relative_to(site)}: expected an anchor of {target.relative_to(site)}, got the link '{link}'"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=SITE, metavar="DIR")
    site = parser.parse_args().output.resolve()
    work = site.with_name(f"{site.name}-work")
    shutil.rmtree(work, ignore_errors=True)
    (work / "pages").mkdir(parents=True)
    reference = make_reference(work)
    stage(reference, work / "pages")
    shutil.copy(ROOT / "tools/docs/mkdocs.yml", work)
    subprocess.run([TOOLS / "bin/zensical", "build", "--strict"], cwd=work, check=True)
    (work / "site/404.html").unlink()  # its links begin with /, but the site may be in any folder
    shutil.rmtree(site, ignore_errors=True)
    (work / "site").rename(site)
    problems = [*broken_links(site), *missing(site, reference)]
    print(*problems, f"{len(problems)} broken links and missing pages; the site begins at {site / 'index.html'}", sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except subprocess.CalledProcessError as failure:
        sys.exit(f"[docs] {failure}")
