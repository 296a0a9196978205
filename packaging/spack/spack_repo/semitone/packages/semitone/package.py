"""Spack recipe of Semitone: docs/packages.md."""
from spack_repo.builtin.build_systems.cmake import CMakePackage, generator
from spack_repo.builtin.build_systems.cuda import CudaPackage

from spack.package import *


class Semitone(CMakePackage, CudaPackage):
    """Mixed-precision and data-parallel training for C++ programs that use LibTorch."""

    license("BSD-3-Clause")

    # The repository that this file is in: `spack dev-build semitone@0.1.0`, in its folder.
    version("0.1.0")

    variant("shared", default=False, description="libsemitone.so in place of static libraries")
    variant("program", default=True, description="the program semitone")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.25:", type="build")
    depends_on("ninja", type="build")
    depends_on("fmt@9:")
    depends_on("spdlog@1.10:")
    depends_on("highway@1.0.3:")
    depends_on("jpeg")
    depends_on("libpng@1.6:")
    depends_on("zlib-api")
    depends_on("nlohmann-json@3.11:", type="build")
    # Headers only; link, since the compiler gets no folders of others.
    depends_on("gloo", type=("build", "link"))
    depends_on("cli11@2.1:", type="build", when="+program")
    # LibTorch is part of PyTorch's package, which is for GPUs by default.
    depends_on("py-torch@2.9: +distributed +gloo", type=("build", "link", "run"))
    depends_on("py-torch ~cuda", when="~cuda")
    # Older releases run on GPUs without Semitone's kernels, and the kernels need nvcc 12.1.
    depends_on("py-torch@2.11: +cuda", when="+cuda")
    depends_on("cuda@12.1:", when="+cuda")
    for architecture in CudaPackage.cuda_arch_values:
        depends_on(f"py-torch cuda_arch={architecture}", when=f"+cuda cuda_arch={architecture}")

    conflicts("%gcc@:11", msg="Semitone needs GCC 12 or newer")
    conflicts("%clang@:13", msg="Semitone needs clang 14 or newer")
    conflicts("platform=darwin", msg="Semitone runs on Linux")

    generator("ninja")

    def cmake_args(self):
        # …/site-packages/torch/share/cmake
        cmake_files = self.spec["py-torch"].package.cmake_prefix_paths[0]
        args = [
            self.define("SEMITONE_LIBTORCH", ancestor(cmake_files, 2)),
            self.define("SEMITONE_LIBRARY", "SHARED" if self.spec.satisfies("+shared") else "STATIC"),
            self.define_from_variant("SEMITONE_APPS", "program"),
            self.define("SEMITONE_CUDA", "ON" if self.spec.satisfies("+cuda") else "OFF"),
            self.define("CMAKE_UNITY_BUILD", True),
            self.define("CMAKE_UNITY_BUILD_BATCH_SIZE", 16),
            *[self.define(f"SEMITONE_{part}", False) for part in ["TESTS", "EXAMPLES", "BENCHMARKS", "WERROR"]],
        ]
        architectures = self.spec.variants["cuda_arch"].value if self.spec.satisfies("+cuda") else ("none",)
        if architectures != ("none",):
            args.append(self.define("CMAKE_CUDA_ARCHITECTURES", ";".join(architectures)))
        return args
