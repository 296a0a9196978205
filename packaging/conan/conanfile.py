"""Conan 2 recipe of Semitone: docs/packages.md.

LibTorch is not among Conan's packages: the environment variable SEMITONE_LIBTORCH names its folder. Its release is an option,
and so part of the package's id.
"""
import os
import re

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain
from conan.tools.files import copy, load, rename, rm, save

ROOT = os.path.join("..", "..")
PACKAGE_FILES = os.path.join("lib", "cmake", "semitone")
# Conan's Highway has another name than its own package file for CMake.
HIGHWAY = """include(CMakeFindDependencyMacro)
find_dependency(highway)
if(NOT TARGET hwy::hwy)
  add_library(hwy::hwy ALIAS highway::hwy)
endif()
"""


def libtorch_in(folder):
    """Such as '2.11.0' or '2.11.0-cuda'."""
    for header in ["headeronly/version.h", "version.h", "csrc/api/include/torch/version.h"]:
        path = os.path.join(folder, "include", "torch", header)
        text = open(path).read() if os.path.exists(path) else ""
        numbers = re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text)
        if len(numbers) == 3:
            cuda = os.path.exists(os.path.join(folder, "lib", "libtorch_cuda.so"))
            return ".".join(numbers) + ("-cuda" if cuda else "")
    raise ConanInvalidConfiguration(f"expected the folder of a LibTorch in SEMITONE_LIBTORCH, got '{folder}'")


class SemitoneConan(ConanFile):
    name = "semitone"
    description = "Mixed-precision and data-parallel training for C++ programs that use LibTorch"
    license = "BSD-3-Clause"
    package_type = "library"
    settings = "os", "arch", "compiler", "build_type"
    options = {
        "shared": [True, False],
        "program": [True, False],
        # fmt, spdlog, Highway, nlohmann/json, libjpeg-turbo, libpng, zlib and CLI11 of the system, in place of Conan's.
        # Gloo's headers are always those of the system, for example of Debian's libgloo-dev.
        "system_libraries": [True, False],
        # Taken from SEMITONE_LIBTORCH.
        "libtorch": [None, "ANY"],
    }
    default_options = {"shared": False, "program": False, "system_libraries": False, "libtorch": None}

    def set_version(self):
        text = load(self, os.path.join(self.recipe_folder, ROOT, "CMakeLists.txt"))
        self.version = re.search(r"project\(semitone VERSION ([0-9.]+)", text).group(1)

    def export_sources(self):
        root = os.path.join(self.recipe_folder, ROOT)
        for pattern in ["CMakeLists.txt", "LICENSE", "THIRD_PARTY.md", "apps/*", "cmake/*", "include/*", "src/*"]:
            copy(self, pattern, root, self.export_sources_folder)

    def configure(self):
        if os.environ.get("SEMITONE_LIBTORCH"):
            self.options.libtorch = libtorch_in(os.environ["SEMITONE_LIBTORCH"])

    def requirements(self):
        if self.options.system_libraries:
            return
        self.requires("spdlog/[>=1.10 <2]")  # first: it decides the release of fmt
        self.requires("fmt/[>=9 <13]")
        self.requires("highway/[>=1.0.3 <2]")
        self.requires("libjpeg-turbo/[>=2.1 <4]")
        self.requires("libpng/[>=1.6 <2]")
        self.requires("zlib/[>=1.2.11 <2]")
        self.requires("nlohmann_json/[>=3.11 <4]", visible=False)
        if self.options.program:
            self.requires("cli11/[>=2.1 <3]", visible=False)

    def validate(self):
        if self.settings.os != "Linux" or self.settings.arch != "x86_64":
            raise ConanInvalidConfiguration(f"expected Linux on x86_64, got {self.settings.os} on {self.settings.arch}")
        check_min_cppstd(self, 20)
        if not os.environ.get("SEMITONE_LIBTORCH"):
            raise ConanInvalidConfiguration("expected the folder of a LibTorch in SEMITONE_LIBTORCH, got nothing")

    def layout(self):
        self.folders.root = ROOT
        self.folders.source = "."
        self.folders.build = os.path.join("build", str(self.settings.build_type).lower())
        self.folders.generators = os.path.join("build", "conan")

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False
        toolchain.cache_variables.update({
            "SEMITONE_LIBTORCH": os.environ["SEMITONE_LIBTORCH"],
            "SEMITONE_LIBRARY": "SHARED" if self.options.shared else "STATIC",
            "SEMITONE_APPS": bool(self.options.program),
            **{f"SEMITONE_{part}": False for part in ["TESTS", "EXAMPLES", "BENCHMARKS", "WERROR"]},
            "CMAKE_UNITY_BUILD": True,
            "CMAKE_UNITY_BUILD_BATCH_SIZE": "16",
        })
        toolchain.generate()
        dependencies = CMakeDeps(self)
        dependencies.set_property("highway", "cmake_file_name", "hwy")
        dependencies.set_property("highway::hwy", "cmake_target_name", "hwy::hwy")
        dependencies.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        # Not by CMake(self), so that `conan export-pkg` takes a build folder that was not configured by Conan.
        self.run(f'cmake --install "{self.build_folder}" --prefix "{self.package_folder}"')
        if self.options.shared:
            # A build of both kinds, of which projects would find the static one.
            rm(self, "semitone-static*.cmake", os.path.join(self.package_folder, PACKAGE_FILES))
            rm(self, "libsemitone*.a", os.path.join(self.package_folder, "lib"))
            pkg_config = os.path.join(self.package_folder, "lib", "pkgconfig")
            if os.path.exists(os.path.join(pkg_config, "semitone_shared.pc")):
                rm(self, "semitone.pc", pkg_config)
                rename(self, os.path.join(pkg_config, "semitone_shared.pc"), os.path.join(pkg_config, "semitone.pc"))
        if not self.options.system_libraries:
            save(self, os.path.join(self.package_folder, PACKAGE_FILES, "hwy-config.cmake"), HIGHWAY)

    def package_info(self):
        # Semitone's own package file.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [PACKAGE_FILES]
        self.cpp_info.libs = ["semitone"] if self.options.shared else []
