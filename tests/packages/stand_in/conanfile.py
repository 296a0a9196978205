"""A library of the system, under the names for CMake that its package in Conan Center has: conan create . --name=fmt --version=9.1.0"""
from conan import ConanFile

# The package file, the target, the library, and macros: of the compiled library, as in the system's package files.
NAMES = {
    "fmt": ("fmt", "fmt::fmt", "fmt", ["FMT_SHARED"]),
    "spdlog": ("spdlog", "spdlog::spdlog", "spdlog", ["SPDLOG_COMPILED_LIB", "SPDLOG_FMT_EXTERNAL"]),
    "highway": (None, None, "hwy", []),
    "libjpeg-turbo": ("JPEG", "JPEG::JPEG", "jpeg", []),
    "libpng": ("PNG", "PNG::PNG", "png", []),
    "zlib": ("ZLIB", "ZLIB::ZLIB", "z", []),
    "nlohmann_json": ("nlohmann_json", "nlohmann_json::nlohmann_json", None, []),
}


class StandIn(ConanFile):
    settings = "os"

    def requirements(self):
        if self.name == "spdlog":
            self.requires("fmt/9.1.0")  # exactly, as in Conan Center

    def package_info(self):
        file, target, library, macros = NAMES[self.name]
        info = self.cpp_info if file else self.cpp_info.components[library]
        info.includedirs = []
        info.libdirs = []
        info.system_libs = [library] if library else []
        info.defines = macros
        if file:
            info.set_property("cmake_file_name", file)
            info.set_property("cmake_target_name", target)
