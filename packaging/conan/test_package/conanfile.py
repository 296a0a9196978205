"""Builds and runs examples/consumer with the package."""
import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain


class SemitoneTest(ConanFile):
    settings = "os", "arch", "compiler", "build_type"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        self.folders.root = os.path.join("..", "..", "..")
        self.folders.source = os.path.join("examples", "consumer")
        self.folders.build = os.path.join("build", "conan", "consumer")
        self.folders.generators = os.path.join("build", "conan", "consumer", "generators")

    def generate(self):
        toolchain = CMakeToolchain(self)
        toolchain.user_presets_path = False
        toolchain.cache_variables["SEMITONE_LIBTORCH"] = os.environ["SEMITONE_LIBTORCH"]
        toolchain.generate()
        CMakeDeps(self).generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def test(self):
        if can_run(self):
            self.run(os.path.join(self.build_folder, "consumer"))
