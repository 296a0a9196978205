"""That the machine code of our CUDA kernels is as it should be, and that tools/check_cuda_objects.py finds each fault.

check_cuda_objects_test.py NVCC OBJECT...
"""
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("check_cuda_objects", ROOT / "tools" / "check_cuda_objects.py")
check_cuda_objects = importlib.util.module_from_spec(spec)
spec.loader.exec_module(check_cuda_objects)

NVCC, OBJECTS = sys.argv[1], [pathlib.Path(name) for name in sys.argv[2:]]

# A kernel for each fault, and one without.
KERNELS = """
constexpr unsigned kOnHost[] = {3, 5};
constexpr unsigned read(unsigned i) { return kOnHost[i % 2]; }
__global__ void right(float* out, const float* in, const float* other, unsigned size) {
  for (unsigned i = blockIdx.x * 256 + threadIdx.x; i < size; i += gridDim.x * 256)
    out[i] = sqrt(static_cast<double>(in[i])) * other[i] / (in[i] + 2) + in[size - i] * other[size - i];
}
__global__ void trapped(unsigned* out) { out[threadIdx.x] = read(threadIdx.x); }
__global__ void hollow(float*) {}
__global__ void indexed(float* out, const unsigned* in) {
  float values[64];
  for (unsigned i = 0; i < 64; ++i) values[in[i] % 64] = in[i + 64];
  out[threadIdx.x] = values[in[threadIdx.x] % 64];
}
__global__ void greedy(float* out, const volatile float* in) {
  float values[100];
#pragma unroll
  for (unsigned i = 0; i < 100; ++i) values[i] = in[i * threadIdx.x];
#pragma unroll
  for (unsigned i = 0; i < 100; ++i) out[i + threadIdx.x] = values[i] * values[(7 * i + 3) % 100];
}
"""


def compiled(architecture):
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = pathlib.Path(folder, "faults.cu"), pathlib.Path(folder, "faults.cubin")
        source.write_text(KERNELS)
        subprocess.run(
            [NVCC, "-std=c++20", "-O3", "--expt-relaxed-constexpr", "-cubin", f"-arch=sm_{architecture}", source, "-o", cubin], check=True
        )
        return cubin.read_bytes()


class OurKernels(unittest.TestCase):
    def test_none_has_a_trap_local_memory_or_too_many_registers(self):
        problems = check_cuda_objects.check(OBJECTS)
        self.assertEqual(problems, [], "\n" + "\n".join(problems))

    def test_all_are_there(self):
        sources = {path.name for path in (ROOT / "src/kernels/cuda").glob("*.cu")}
        self.assertEqual({path.name.removesuffix(path.suffix) for path in OBJECTS}, sources)


class CheckCudaObjects(unittest.TestCase):
    def test_finds_each_fault_on_each_architecture(self):
        architectures = {cubin.architecture for path in OBJECTS for cubin in check_cuda_objects.cubins_of(path.read_bytes())}
        self.assertTrue(architectures)
        for architecture in architectures:
            with self.subTest(architecture):
                cubins = check_cuda_objects.cubins_of(compiled(architecture))
                self.assertEqual([cubin.architecture for cubin in cubins], [architecture])
                problems = check_cuda_objects.problems_in(cubins, "faults")

                def said_of(kernel):
                    return [problem for problem in problems if kernel in problem]

                self.assertEqual(said_of("right"), [])
                self.assertIn("a trap", "".join(said_of("trapped")))
                self.assertIn("is its body empty", "".join(said_of("hollow")))
                self.assertIn("bytes of local memory", "".join(said_of("indexed")))
                self.assertIn("more than its budget of 64", "".join(said_of("greedy")))

    def test_finds_objects_without_machine_code(self):
        self.assertEqual(len(check_cuda_objects.problems_in([], "a.o")), 1)
        self.assertEqual(len(check_cuda_objects.problems_in([check_cuda_objects.Cubin(90, [])], "a.o")), 1)

    def test_finds_architectures_with_different_kernels(self):
        one = check_cuda_objects.Kernel("one", 32, 0, 0)
        other = one._replace(name="other")
        cubins = [check_cuda_objects.Cubin(80, [one]), check_cuda_objects.Cubin(90, [one, other])]
        self.assertEqual(len(check_cuda_objects.problems_in(cubins, "a.o")), 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
