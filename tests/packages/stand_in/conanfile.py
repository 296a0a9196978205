"""A library of the system, under the names for CMake that its package in Conan Center has: conan create . --name=fmt --version=9.1.0"""
from conan import ConanFile

# The package file, the target, and the library.
NAMES = {
    "fmt": ("fmt", "fmt::fmt", "fmt"),
    "spdlog": ("spdlog", "spdlog::spdlog", "spdlog"),
    "highway": (None, None, "hwy"),
    "libjpeg-turbo": ("JPEG", "JPEG::JPEG", "jpeg"),
    "libpng": ("PNG", "PNG::PNG", "png"),
    "zlib": ("ZLIB", "ZLIB::ZLIB", "z"),
    "nlohmann_json": ("nlohmann_json", "nlohmann_json::nlohmann_json", None),
}


class StandIn(ConanFile):
    settings = "os"

    def requirements(self):
        if self.name == "spdlog":
            self.requires("fmt/9.1.0")  # exactly, as in Conan Center

    def package_info(self):
        self.cpp_info.includedirs = []
        self.cpp_info.libdirs = []
        file, target, library = NAMES[self.name]
        info = self.cpp_info.components["hwy"] if self.name == "highway" else self.cpp_info
        info.includedirs = []
        info.libdirs = []
        info.system_libs = [library] if library else []
        if file:
            self.cpp_info.set_property("cmake_file_name", file)
            self.cpp_info.set_property("cmake_target_name", target)
        if self.name in ("fmt", "spdlog"):  # as the system's package files: compiled, not headers only
            self.cpp_info.defines = [{"fmt": "FMT_SHARED", "spdlog": "SPDLOG_COMPILED_LIB"}[self.name], "SPDLOG_FMT_EXTERNAL"]
