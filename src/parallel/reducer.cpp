#include "src/parallel/reducer.h"

#include "src/core/libtorch_release.h"

#include <torch/types.h>

#include <cstdint>
#include <mutex>
#include <tuple>
#include <utility>

namespace semitone::parallel::detail {

Reducer::Reducer(std::vector<at::Tensor> parameters, Buckets buckets,
                 c10::intrusive_ptr<c10d::ProcessGroup> group, std::vector<bool> sparse,
                 std::int64_t first_cap, std::int64_t cap, bool find_unused_parameters,
                 bool gradient_as_bucket_view, std::unordered_map<std::size_t, std::string> names)
    : c10d::Reducer(std::move(parameters), std::move(buckets), std::move(group), std::move(sparse),
                    cap, find_unused_parameters, gradient_as_bucket_view, std::move(names),
                    first_cap, /*skip_all_reduce_unused_params=*/false,
                    /*use_python_reducer=*/false
#if SEMITONE_LIBTORCH_SINCE(2, 11)
                    ,
                    /*bucket_bytes_cap_list=*/{}
#endif
      ) {
}

bool Reducer::expects_gradients() const {
  const std::lock_guard lock(mutex_);
  return expect_autograd_hooks_;
}

void Reducer::ignore_gradients() {
  const std::lock_guard lock(mutex_);
  expect_autograd_hooks_ = false;
}

void Reducer::note_used() {
  const std::lock_guard lock(mutex_);
  if (local_used_map_.defined()) used_before_ = local_used_map_.clone();
}

void Reducer::prepare_unused() {
  const std::lock_guard lock(mutex_);
  auto used = local_used_map_.accessor<int, 1>();
  for (std::size_t i = 0; i < params_.size(); ++i) {
    if (!params_[i].grad().defined()) used[static_cast<std::int64_t>(i)] = 0;
  }
  unused_.assign(params_.size(), false);
  if (!expect_autograd_hooks_) return;
  for (const std::size_t index : unused_parameters_) {
    unused_[index] = true;
    const at::Tensor& parameter = params_[index];
    if (!expect_sparse_gradients_[index] || parameter.grad().defined()) continue;
    // As an embedding's: rows of values. Ranks send each other the sizes of both parts.
    parameter.mutable_grad() = at::_sparse_coo_tensor_with_dims(
        /*sparse_dim=*/1, parameter.dim() - 1, parameter.sizes(),
        parameter.options().layout(at::kSparse).requires_grad(false));
    given_empty_.push_back(index);
  }
}

void Reducer::take_back_empty_gradients() {
  for (const std::size_t index : given_empty_) {
    at::Tensor& gradient = params_[index].mutable_grad();
    if (gradient.defined() && gradient.is_sparse() && gradient._nnz() == 0) gradient.reset();
  }
  given_empty_.clear();
}

bool Reducer::is_unused(std::size_t index) const {
  const std::lock_guard lock(mutex_);
  return expect_autograd_hooks_ && !unused_.empty() && unused_[index];
}

bool Reducer::forget_gradients() {
  const std::lock_guard lock(mutex_);
  if (next_bucket_ > 0) return false;
  take_back_empty_gradients();
  expect_autograd_hooks_ = false;
  require_finalize_ = false;
  // All gradients of one pass, or none.
  rebuilt_params_.clear();
  rebuilt_param_indices_.clear();
  // A static graph is that of its first step, permanently.
  if (!static_graph_ && used_before_.defined()) local_used_map_.copy_(used_before_);
  return true;
}

void Reducer::count_from_here() {
  const std::lock_guard lock(mutex_);
  for (auto& [index, count] : numGradHooksTriggeredMap_) count = 0;
  num_bwd_calls_ = 0;
  first_autograd_hook_called_ = false;
}

bool Reducer::is_laid_out() const {
  const std::lock_guard lock(mutex_);
  return has_rebuilt_bucket_;
}

Buckets Reducer::buckets() const {
  const std::lock_guard lock(mutex_);
  Buckets buckets;
  buckets.reserve(buckets_.size());
  for (const Bucket& bucket : buckets_) buckets.push_back(bucket.variable_indices);
  return buckets;
}

void Reducer::lay_out(Buckets buckets) {
  const std::lock_guard lock(mutex_);
  rebuilt_params_.clear();
  rebuilt_param_indices_.clear();
  has_rebuilt_bucket_ = true;
  initialize_buckets(std::move(buckets));
}

std::vector<std::size_t> Reducer::arrivals() const {
  const std::lock_guard lock(mutex_);
  if (rebuilt_param_indices_.size() != params_.size()) return {};
  return {rebuilt_param_indices_.begin(), rebuilt_param_indices_.end()};
}

void Reducer::set_arrivals(const std::vector<std::size_t>& indices) {
  const std::lock_guard lock(mutex_);
  if (has_rebuilt_bucket_) return;
  rebuilt_params_.clear();
  rebuilt_param_indices_.clear();
  for (const std::size_t index : indices) push_rebuilt_params(index);
}

Buckets divide_into_buckets(const std::vector<at::Tensor>& parameters,
                            const std::vector<std::size_t>& sizes, const std::vector<bool>& sparse,
                            const std::vector<std::size_t>& order) {
  if (order.empty())
    return std::get<0>(c10d::compute_bucket_assignment_by_size(parameters, sizes, sparse));
  std::vector<at::Tensor> ordered;
  ordered.reserve(order.size());
  for (const std::size_t index : order) ordered.push_back(parameters[index]);
  const std::vector<std::int64_t> indices(order.begin(), order.end());
  return std::get<0>(c10d::compute_bucket_assignment_by_size(ordered, sizes, sparse, indices));
}

}  // namespace semitone::parallel::detail
