#pragma once

#include "semitone/optim/fused_optimizer.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

// Compares a fused optimizer with LibTorch's.
namespace semitone::test {

// The number of roundings in a step of one parameter: fp32 operations whose result is as large as
// the weight, and others, which lead to the update. LibTorch's root, off by up to a unit, counts
// twice.
struct Operations {
  int of_weight = 1;
  int of_update;
};

// The largest distance between two fp32 trajectories, of which neither is more correct: LibTorch
// fuses some multiplications and additions, Semitone rounds them separately. An operation has an
// error of at most half a unit in the last place of its result on either side, so the sides differ
// by at most one. An error of the weight persists. An error of the optimizer's state persists at
// most unchanged (it is multiplied by factors below 1), and is part of every later update. After
// step t the distance is
//
//   t units of the weight for each of its operations, and
//   1 + 2 + … + t units of the update for each of the others.
//
// A unit is 2^-23 of the largest value so far: for weights of each element, for updates of all,
// since one that cancels is as exact as its terms.
class Apart {
 public:
  Apart(Operations operations, const std::vector<at::Tensor>& start) : operations_(operations) {
    for (const at::Tensor& parameter : start) {
      weights_.push_back(wide(parameter));
      largest_.push_back(weights_.back().abs());
    }
  }

  // Both sides' parameters after a step.
  void expect_near(const std::vector<at::Tensor>& got, const std::vector<at::Tensor>& want) {
    ++steps_;
    for (std::size_t i = 0; i < want.size(); ++i) {
      const at::Tensor now = wide(want[i]);
      largest_update_ = std::max(largest_update_, (now - weights_[i]).abs().max().item<double>());
      largest_[i] = at::maximum(largest_[i], now.abs());
      weights_[i] = now;
    }
    for (std::size_t i = 0; i < want.size(); ++i) {
      SCOPED_TRACE(c10::str("step ", steps_, ", parameter ", i));
      const double units_of_update = operations_.of_update * steps_ * (steps_ + 1) / 2.0;
      const at::Tensor bound = 0x1p-23 * (operations_.of_weight * steps_ * largest_[i] +
                                          units_of_update * largest_update_);
      const at::Tensor far = (wide(got[i]) - weights_[i]).abs();
      EXPECT_TRUE((far <= bound).all().item<bool>())
          << "the largest difference is " << far.max().item<double>();
    }
  }

 private:
  static at::Tensor wide(const at::Tensor& tensor) { return tensor.detach().to(at::kDouble); }

  Operations operations_;
  int steps_ = 0;
  double largest_update_ = 0;
  std::vector<at::Tensor> weights_;  // LibTorch's
  std::vector<at::Tensor> largest_;  // magnitudes of each element so far
};

struct Pair {
  std::unique_ptr<optim::FusedOptimizer> ours;
  std::unique_ptr<torch::optim::Optimizer> theirs;
};

// Takes `steps` steps with both over the same random values and gradients. make(parameters of the
// fused optimizer, parameters of LibTorch's) returns the pair.
template <typename Make>
void expect_as_torch(const Make& make, Operations operations, int steps = 20) {
  using Shape = std::vector<std::int64_t>;
  torch::manual_seed(11);
  std::vector<at::Tensor> ours;
  std::vector<at::Tensor> theirs;
  for (const Shape& shape : std::vector<Shape>{{1000}, {}, {17, 3}, {40, 1, 9}}) {
    ours.push_back(torch::randn(shape).requires_grad_());
    theirs.push_back(ours.back().detach().clone().requires_grad_());
  }
  const Pair pair = make(ours, theirs);
  Apart apart(operations, theirs);
  for (int step = 1; step <= steps; ++step) {
    for (std::size_t i = 0; i < ours.size(); ++i) {
      if (step % 3 == 0 && i == 2) {  // none in some steps
        ours[i].mutable_grad().reset();
        theirs[i].mutable_grad().reset();
        continue;
      }
      ours[i].mutable_grad() = torch::randn(ours[i].sizes());
      theirs[i].mutable_grad() = ours[i].grad();
    }
    pair.ours->step();
    pair.theirs->step();
    apart.expect_near(ours, theirs);
  }
}

}  // namespace semitone::test
