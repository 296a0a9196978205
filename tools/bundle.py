#!/usr/bin/env python3
"""Packs the sources and those of all libraries that the build and the tests use into one archive: build/bundle/semitone-bundle.tar.gz.

    tools/bundle.py [--out FILE] [--third-party FOLDER]

A machine with g++, CMake, ninja and a LibTorch, such as the one of a Python that has torch, builds the unpacked bundle with its
build.sh: without a network, root or packages of a distribution. tools/bundle/third_party.json names the libraries: Debian packages with
fixed versions and checksums, of which the bundle has headers and sources, and no compiled code. They are downloaded once, into
.deps/third_party. --third-party takes a folder that already has one folder for each library instead.

The archive has the files of the work tree that git does not ignore. The same files give the same archive, byte for byte.
"""
import argparse
import gzip
import hashlib
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
PARTS = HERE / "bundle"
NAME = "semitone-bundle"
MOST_BYTES = 60 * 2**20


class Failed(Exception):
    pass


def run(*command, folder=None):
    done = subprocess.run(list(map(str, command)), cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        raise Failed(f"expected success of '{' '.join(map(str, command))}', got:\n{(done.stdout + done.stderr).strip()}")
    return done.stdout


def checksum(content):
    return hashlib.sha256(content).hexdigest()


class Packages:
    """apt-get with lists of its own, which contain source packages too; the system's are left as they are."""

    def __init__(self, folder):
        self.folder, self.ready = folder, False
        state = folder / "apt"
        self.options = ["-qq", "-o", f"Dir::Etc::SourceList={state}/sources.list", "-o", "Dir::Etc::SourceParts=/dev/null",
                        "-o", f"Dir::State::Lists={state}/lists", "-o", "Dir::Cache::pkgcache=", "-o", "Dir::Cache::srcpkgcache=",
                        "-o", "APT::Sandbox::User="]

    def prepare(self):
        if self.ready:
            return
        if not shutil.which("apt-get") or not shutil.which("dpkg-source"):
            raise Failed("expected apt-get and dpkg-source, which fetch the libraries' sources, got none — make the bundle on Debian 12, "
                         "with the package dpkg-dev")
        if "VERSION_CODENAME=bookworm" not in pathlib.Path("/etc/os-release").read_text():
            raise Failed("expected Debian 12, whose packages have the releases of tools/bundle/third_party.json, got another system")
        (self.folder / "apt/lists/partial").mkdir(parents=True, exist_ok=True)
        (self.folder / "apt/sources.list").write_text("".join(f"{kind} {line}\n" for line in archives() for kind in ("deb", "deb-src")))
        run("apt-get", *self.options, "update")
        self.ready = True

    def fetch(self, entry, folder):
        self.prepare()
        if "source" in entry:
            run("apt-get", *self.options, "source", "--download-only", f"{entry['source']}={entry['version']}", folder=folder)
        else:
            run("apt-get", *self.options, "download", f"{entry['binary']}={entry['version']}", folder=folder)


def archives():
    """The system's package archives of this release of the distribution, as lines for sources.list without "deb"."""
    release = re.search(r"^VERSION_CODENAME=(\w+)", pathlib.Path("/etc/os-release").read_text(), re.M).group(1)
    etc, found = pathlib.Path("/etc/apt"), []
    for file in [etc / "sources.list", *sorted(etc.glob("sources.list.d/*.list"))]:
        found += re.findall(r"^deb ((?:\[.*?\] )?\S+ \S+ .*)$", file.read_text() if file.exists() else "", re.M)
    for file in sorted(etc.glob("sources.list.d/*.sources")):
        for text in file.read_text().split("\n\n"):
            fields = dict(re.findall(r"^([\w-]+): *(.*)$", text, re.M))
            key = f"[signed-by={fields['Signed-By']}] " if "Signed-By" in fields else ""
            found += [f"{key}{uri} {suite} {fields.get('Components', '')}" for uri in fields.get("URIs", "").split()
                      for suite in fields.get("Suites", "").split()]
    lines = [line for line in found if re.match(rf"(\[.*?\] )?\S+ {release}(-\w+)? ", line)]
    if not lines:
        raise Failed(f"expected a package archive of {release} in /etc/apt, got none")
    return lines


def file_of(entry, folder):
    """The file that apt-get fetches, or None: the .dsc, which has the checksums of the others, or the .deb."""
    version = entry["version"].split(":")[-1]
    names = [f"{entry['source']}_{version}.dsc"] if "source" in entry else [file.name for file in folder.glob(f"{entry['binary']}_*.deb")]
    return next((folder / name for name in names if (folder / name).exists()), None)


def unpack(entry, downloads, packages):
    """The folder with the library's files, and its licence's text."""
    folder = downloads / f"{entry['name']}-{entry['sha256'][:12]}"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        packages.fetch(entry, folder)
        file = file_of(entry, folder)
        if file is None or checksum(file.read_bytes()) != entry["sha256"]:
            raise Failed(f"expected {entry['name']} {entry['version']} with the checksum {entry['sha256']}, got {file or 'no file'} with "
                         f"{checksum(file.read_bytes()) if file else 'none'} — correct tools/bundle/third_party.json")
        # dpkg-source checks the other files' checksums, and applies the distribution's patches.
        run(*(["dpkg-source", "--extract", file] if "source" in entry else ["dpkg", "--extract", file]), folder / "files")
        (folder / "complete").touch()
    if "source" in entry:
        return folder / "files", (folder / "files/debian/copyright").read_bytes()
    return folder / "files" / entry["root"], (folder / "files/usr/share/doc" / entry["binary"] / "copyright").read_bytes()


def files_of_library(entry, downloads, packages):
    root, licence = unpack(entry, downloads, packages)
    files = {f"third_party/{entry['name']}/LICENCE": licence}
    for pattern in entry["keep"]:
        kept = [path for path in root.glob(pattern) if path.is_file() and not any(path.match(other) for other in entry.get("leave", []))]
        if not kept:
            raise Failed(f"expected files of {entry['name']} that match {pattern}, got none — correct tools/bundle/third_party.json")
        files |= {f"third_party/{entry['name']}/{path.relative_to(root).as_posix()}": path.read_bytes() for path in kept}
    return files


def files_of_folder(folder, entries):
    """The libraries from a folder with one folder for each."""
    for entry in entries:
        if not (folder / entry["name"]).is_dir():
            raise Failed(f"expected a folder {entry['name']} in {folder}, got none")
    return {f"third_party/{path.relative_to(folder).as_posix()}": path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def commit():
    """The commit, with "-changed" if the work tree differs from it, and its time."""
    revision, time = run("git", "log", "-1", "--format=%H %ct", folder=ROOT).split()
    changed = run("git", "status", "--porcelain", folder=ROOT).strip()
    return revision + ("-changed" if changed else ""), int(time)


def own_files():
    """Content and whether it is a program, of each file of the work tree."""
    names = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT).split("\0")
    files = {}
    for name in filter(None, names):
        path = ROOT / name
        if path.is_file():
            files[name] = (path.read_bytes(), os.access(path, os.X_OK))
    return files


def manifest(revision, entries, files):
    version = re.search(r"project\(semitone VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    libraries = [{"name": entry["name"], "package": entry.get("source") or entry["binary"], "version": entry["version"],
                  "package_sha256": entry["sha256"], "licence": f"third_party/{entry['name']}/LICENCE",
                  "files": sum(name.startswith(f"third_party/{entry['name']}/") for name in files)} for entry in entries]
    return json.dumps({"semitone": version, "commit": revision, "third_party": libraries}, indent=1).encode() + b"\n"


def pack(files, time):
    """A tar.gz of files by name: content and whether it is a program."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in sorted(files):
            content, is_program = files[name]
            entry = tarfile.TarInfo(f"{NAME}/{name}")
            entry.size, entry.mtime, entry.mode = len(content), time, 0o755 if is_program else 0o644
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(stream.getvalue(), mtime=0)


def bundle(options):
    entries = json.loads((PARTS / "third_party.json").read_text())
    downloads = ROOT / ".deps/third_party"
    if options.third_party:
        libraries = files_of_folder(options.third_party, entries)
    else:
        with tempfile.TemporaryDirectory() as temporary:
            packages = Packages(pathlib.Path(temporary))
            libraries = {name: content for entry in entries for name, content in files_of_library(entry, downloads, packages).items()}
    revision, time = commit()
    files = own_files()
    files |= {name: (content, False) for name, content in libraries.items()}
    files["third_party/CMakeLists.txt"] = ((PARTS / "CMakeLists.txt").read_bytes(), False)
    files["build.sh"] = ((PARTS / "build.sh").read_bytes(), True)
    files["MANIFEST.json"] = (manifest(revision, entries, files), False)
    archive = pack(files, time)
    if len(archive) > MOST_BYTES:
        raise Failed(f"expected at most {MOST_BYTES} bytes, got {len(archive)}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_bytes(archive)
    print(f"{options.out}: {len(archive) / 2**20:.1f} MiB, {len(files)} files, commit {revision}\nsha256 {checksum(archive)}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / f"build/bundle/{NAME}.tar.gz", metavar="FILE")
    parser.add_argument("--third-party", type=pathlib.Path, metavar="FOLDER", help="the libraries, one folder each, instead of a download")
    try:
        bundle(parser.parse_args())
    except Failed as failure:
        sys.exit(f"[bundle] {failure}")


if __name__ == "__main__":
    main()
