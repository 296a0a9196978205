// A race in a parallel region, which ThreadSanitizer has to report.

#include "src/core/parallel_for.h"

#include <ATen/Parallel.h>

#include <cstdint>
#include <cstdio>

int main() {
  at::set_num_threads(2);
  std::int64_t sum = 0;
  semitone::parallel_for(0, 1000, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) sum += i;
  });
  std::printf("%lld\n", static_cast<long long>(sum));
}
