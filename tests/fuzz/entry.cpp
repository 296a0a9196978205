// libFuzzer's entry, compiled once for each target.

#include "tests/fuzz/targets.h"

#include <cstddef>
#include <cstdint>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  semitone::fuzz::SEMITONE_FUZZ_TARGET({reinterpret_cast<const char*>(data), size});
  return 0;
}
