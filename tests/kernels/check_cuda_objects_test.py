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
__global__ void unscale_table(float* out, const float* in, const float* other, unsigned size) {
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < size; i += 256) {
    const double value = in[i];
    out[i] = value * value + other[static_cast<unsigned>(value)];
  }
}
__global__ void move(float4* out, const float4* in, const float4* other, unsigned size) {
#pragma unroll 1
  for (unsigned i = threadIdx.x; i < size; i += 256) {
    const float4 a = in[i];
    const float4 b = other[i];
    out[i] = make_float4(a.x * b.x, a.y / b.y, a.z - b.z, a.w + b.w);
  }
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


class SassReport(unittest.TestCase):
    def report(self, *arguments):
        program = [sys.executable, ROOT / "tools" / "sass_report.py"]
        return subprocess.run([*program, *arguments], capture_output=True, text=True, check=False)

    def test_has_a_row_for_each_kernel(self):
        (adam,) = [path for path in OBJECTS if path.name.startswith("adam.")]
        table = self.report(adam).stdout.splitlines()
        self.assertEqual({line.count("|") for line in table}, {table[0].count("|")})
        kernels = [cubin.kernels for cubin in check_cuda_objects.cubins_of(adam.read_bytes()) if cubin.architecture == 90]
        self.assertEqual(len(table) - 2, len(kernels[0]) if kernels else 0)

    def test_checks_like_check_cuda_objects(self):
        self.assertEqual(self.report("--check", *OBJECTS).returncode, 0)


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
                narrow = "".join(said_of("unscale_table"))
                self.assertIn("its widest load has 4 bytes, less than 16", narrow)
                self.assertIn("4 bytes on their way to a thread, less than 32", narrow)
                self.assertIn("fp64 instructions in its loop", narrow)

    def test_finds_many_instructions(self):
        loop = check_cuda_objects.Loop(1000, [16, 16], [16], 2, 32, 1, 0)
        kernel = check_cuda_objects.Kernel("unscale_table", 32, 0, 0, loop)
        (problem,) = check_cuda_objects.narrow(kernel)
        self.assertIn("333 instructions in its loop for each 16 bytes, more than 120", problem)
        self.assertEqual(list(check_cuda_objects.narrow(kernel._replace(loop=loop._replace(instructions=300)))), [])

    def test_reads_the_accesses_of_a_loop(self):
        for architecture in (80, 90):
            with self.subTest(architecture):
                (cubin,) = check_cuda_objects.cubins_of(compiled(architecture))
                loops = {check_cuda_objects.short(kernel.name): kernel.loop for kernel in cubin.kernels}
                (move,) = [loop for name, loop in loops.items() if "4move" in name]
                self.assertEqual((move.loads, move.stores, move.fp64), ([16, 16], [16], 0))
                # Two loads at once; in the other kernel, the second one's address depends on the first one's result.
                self.assertEqual((move.loads_in_flight, move.bytes_in_flight, move.waits), (2, 32, 1))
                (narrow,) = [loop for name, loop in loops.items() if "unscale_table" in name]
                self.assertEqual((narrow.loads, narrow.stores), ([4, 4], [4]))
                self.assertEqual((narrow.loads_in_flight, narrow.waits), (1, 2))

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
