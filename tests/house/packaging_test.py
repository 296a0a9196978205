#!/usr/bin/env python3
"""Checks the recipes in packaging/: the project's version, the build's options and libraries. Of vcpkg's port, its commands are
run with stand-ins for vcpkg's functions; the others are not run."""
import ast
import json
import os
import pathlib
import re
import subprocess
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGING = ROOT / "packaging"
VERSION = re.search(r"^project\(semitone VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text(), re.M).group(1)
SPACK = "spack/spack_repo/semitone/packages/semitone/package.py"
RECIPES = {name: (PACKAGING / name).read_text() for name in [
    "conan/conanfile.py", "vcpkg/semitone/portfile.cmake", "vcpkg/semitone/vcpkg.json", SPACK, "docker/Dockerfile"]}

# They print what they are given. That for features takes its keywords as vcpkg's does.
VCPKG_FUNCTIONS = """cmake_minimum_required(VERSION 3.25)
function(vcpkg_check_features)
  cmake_parse_arguments(PARSE_ARGV 0 arg "" "OUT_FEATURE_OPTIONS;PREFIX" "FEATURES;INVERTED_FEATURES")
  list(GET arg_FEATURES 0 name)
  list(GET arg_FEATURES 1 option)
  set(value OFF)
  if(name IN_LIST FEATURES)
    set(value ON)
  endif()
  set(${arg_OUT_FEATURE_OPTIONS} -D${option}=${value} PARENT_SCOPE)
endfunction()
function(print)
  message(STATUS "${ARGN}")
endfunction()
foreach(name vcpkg_cmake_configure vcpkg_cmake_install vcpkg_cmake_config_fixup vcpkg_fixup_pkgconfig vcpkg_copy_tools vcpkg_install_copyright)
  cmake_language(EVAL CODE "function(${name})\n print(${name} \\${ARGN})\nendfunction()")
endforeach()
include(${CURRENT_PORT_DIR}/portfile.cmake)
"""


class Packaging(unittest.TestCase):
    def test_recipes_have_the_projects_version(self):
        self.assertEqual(json.loads(RECIPES["vcpkg/semitone/vcpkg.json"])["version"], VERSION)
        self.assertEqual(re.findall(r'^    version\("([^"]+)"', RECIPES[SPACK], re.M), [VERSION])
        self.assertEqual(re.findall(r"^ARG VERSION=(.+)$", RECIPES["docker/Dockerfile"], re.M), [VERSION])
        # Conan's reads it from CMakeLists.txt.
        pattern = re.search(r're\.search\(r"(.+?)", text\)', RECIPES["conan/conanfile.py"]).group(1)
        self.assertEqual(re.search(pattern, (ROOT / "CMakeLists.txt").read_text()).group(1), VERSION)
        page = (ROOT / "docs/packages.md").read_text()
        self.assertEqual(set(re.findall(r"semitone(?:-dev)?[-_@](\d+\.\d+\.\d+)", page)), {VERSION})
        self.assertEqual(set(re.findall(r"libsemitone(\d+\.\d+)", page)), {VERSION.rpartition(".")[0]})

    def test_recipes_use_options_that_exist(self):
        options = set(re.findall(r"\bSEMITONE_\w+", (ROOT / "cmake/options.cmake").read_text()))
        for name, text in RECIPES.items():
            used = set(re.findall(r"\bSEMITONE_[A-Z_]*[A-Z]\b", text))
            used |= {f"SEMITONE_{part}" for parts in re.findall(r'for part in (\[.*?\])', text) for part in ast.literal_eval(parts)}
            self.assertLessEqual(used, options, name)
            if not name.endswith(".json"):
                self.assertIn("SEMITONE_LIBTORCH", used, name)

    def test_recipes_have_the_libraries_that_the_build_finds(self):
        found = set(re.findall(r"^ *semitone_find\((\w+)", (ROOT / "CMakeLists.txt").read_text(), re.M))
        names = {"CLI11": "cli11", "fmt": "fmt", "spdlog": "spdlog", "nlohmann_json": "nlohmann[-_]json", "ZLIB": "zlib", "hwy": "highway",
                 "PNG": "libpng", "JPEG": "(?:libjpeg-turbo|jpeg)"}
        self.assertEqual(found, set(names))
        for name in ["conan/conanfile.py", "vcpkg/semitone/vcpkg.json", SPACK]:
            for library in names.values():
                self.assertRegex(RECIPES[name], rf'"{library}[-@/"a-z\[]', name)

    def test_port_configures_and_installs_what_is_asked_for(self):
        with tempfile.TemporaryDirectory() as folder:
            script = pathlib.Path(folder, "run.cmake")
            script.write_text(VCPKG_FUNCTIONS)
            for feature, linkage in [("core", "static"), ("core;program", "dynamic")]:
                done = subprocess.run(
                    ["cmake", f"-DCURRENT_PORT_DIR={PACKAGING}/vcpkg/semitone", f"-DFEATURES={feature}", f"-DCURRENT_PACKAGES_DIR={folder}",
                     f"-DVCPKG_LIBRARY_LINKAGE={linkage}", "-P", script],
                    env={**os.environ, "SEMITONE_LIBTORCH": "/libtorch"}, text=True, capture_output=True)
                self.assertEqual(done.returncode, 0, done.stderr)
                program = "program" in feature
                self.assertIn(f"-DSEMITONE_APPS={'ON' if program else 'OFF'};-DSEMITONE_LIBTORCH=/libtorch", done.stdout)
                self.assertIn(f"-DSEMITONE_LIBRARY={'SHARED' if linkage == 'dynamic' else 'STATIC'};", done.stdout)
                self.assertEqual("vcpkg_copy_tools" in done.stdout, program)

    def test_recipes_are_well_formed(self):
        for path in PACKAGING.rglob("*.py"):
            ast.parse(path.read_text(), str(path))
        # A stage of an image is copied from one that exists.
        stages = set(re.findall(r"^FROM .* AS (\S+)$", RECIPES["docker/Dockerfile"], re.M))
        self.assertEqual(stages, {"build-cpu", "cpu", "build-cuda", "cuda"})
        self.assertLessEqual(set(re.findall(r"--from=(\S+)", RECIPES["docker/Dockerfile"])), stages)


if __name__ == "__main__":
    unittest.main()
