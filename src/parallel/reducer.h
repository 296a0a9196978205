#pragma once

// The only file that includes c10d's Reducer, whose interface changes between LibTorch's versions.

#include "src/parallel/gradient_order.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace semitone::parallel::detail {

// c10d's Reducer, which assumes that every backward pass that begins also ends.
class Reducer final : public c10d::Reducer {
 public:
  // `first_cap` and `cap`: sizes in bytes of the first bucket and of the others.
  Reducer(std::vector<at::Tensor> parameters, Buckets buckets,
          c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<bool> sparse,
          std::int64_t first_cap, std::int64_t cap, bool find_unused_parameters,
          bool gradient_as_bucket_view, std::unordered_map<std::size_t, std::string> names);

  // Whether gradients that arrive now are reduced.
  bool expects_gradients() const;

  // Stops that until the next prepare_for_backward.
  void ignore_gradients();

  // Notes which parameters have had gradients so far, in passes that were not reduced. Call it before
  // prepare_for_backward.
  void note_used();

  // Call when a backward pass reaches the results of forward, before its first gradient. Parameters
  // that lost their gradients of earlier passes count as unused, unless this pass reaches them, and
  // unused ones whose gradients are sparse get empty ones.
  void prepare_unused();
  // Call when the gradients are reduced: takes back those that are still empty.
  void take_back_empty_gradients();
  // Whether the search of prepare_for_backward has not found a parameter.
  bool is_unused(std::size_t index) const;

  // Drops the gradients since prepare_for_backward. False if some have been sent.
  bool forget_gradients();

  // Drops the number of gradients of each parameter, which a static graph's first step counts.
  void count_from_here();

  // Whether the buckets are final: laid out in the order of gradients.
  bool is_laid_out() const;
  Buckets buckets() const;
  // Makes these buckets the final ones. Between two steps.
  void lay_out(Buckets buckets);

  // The order in which the first step's gradients became ready, in which rebuild_buckets will lay
  // out buckets. Empty unless all did, and when it has.
  std::vector<std::size_t> arrivals() const;
  void set_arrivals(const std::vector<std::size_t>& indices);

 private:
  at::Tensor used_before_;                // local_used_map_ as note_used() found it
  std::vector<std::size_t> given_empty_;  // parameters
  std::vector<bool> unused_;              // as prepare_unused() found them
};

// c10d's division of tensors among buckets with these sizes in bytes: of the first, and of the
// others.
Buckets divide_into_buckets(const std::vector<at::Tensor>& parameters,
                            const std::vector<std::size_t>& sizes, const std::vector<bool>& sparse,
                            const std::vector<std::size_t>& order = {});

}  // namespace semitone::parallel::detail
