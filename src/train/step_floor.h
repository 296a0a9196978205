#pragma once

#include "src/train/workload.h"

#include <cstdint>
#include <string>
#include <vector>

namespace semitone::train {

// The time of a step's matrix products and convolutions, each of them alone in a loop, so that its
// data are in the caches as far as they fit. A step takes at least as long with the same kernels.
struct StepFloor {
  struct Product {
    std::string name;        // "convolution bfloat16 [16, 64, 56, 56] [64, 64, 3, 3]"
    std::int64_t calls = 0;  // in a step
    double seconds = 0;      // the minimum of a call
    double total() const { return static_cast<double>(calls) * seconds; }
  };
  std::vector<Product> products;  // those with the largest totals first
  // The products of attention, which runs in blocks, at the rate of the fastest matrix product.
  double attention_seconds = 0;
  double step_seconds = 0;  // the minimum of a step, timed in the same rounds

  double seconds() const;
};

// Runs a step to see its products, and then each product and the step in `rounds` rounds. On a CPU.
StepFloor measure_floor(Workload& workload, std::int64_t rounds);

}  // namespace semitone::train
