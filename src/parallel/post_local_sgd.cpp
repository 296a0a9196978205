#include "semitone/parallel/post_local_sgd.h"

#include "semitone/core/error.h"
#include "src/core/archive.h"
#include "src/core/exact_weights.h"
#include "src/parallel/averaging.h"

#include <ATen/ops/flatten_dense_tensors.h>
#include <ATen/ops/unflatten_dense_tensors.h>
#include <torch/types.h>

#include <cstddef>
#include <map>
#include <string>
#include <utility>

namespace semitone::parallel {
namespace {

constexpr auto kPostLocalSGD = "parallel.post_local_sgd";
constexpr auto kModelAverager = "parallel.periodic_model_averager";

void require_at_least(const char* component, const char* name, std::int64_t value,
                      std::int64_t least) {
  if (value >= least) return;
  throw Error(component, c10::str("a ", name, " of ", least, " or more"), std::to_string(value));
}

}  // namespace

PostLocalSGDHook::PostLocalSGDHook(comm::Group subgroup, const PostLocalSGDOptions& options)
    : subgroup_(std::move(subgroup)), options_(options) {
  require_at_least(kPostLocalSGD, "start_localSGD_iter", options.start_localSGD_iter(), 0);
}

c10::intrusive_ptr<c10::ivalue::Future> PostLocalSGDHook::reduce(const GradientBucket& bucket,
                                                                 const comm::Group& group) {
  const bool is_local = iter_ >= options_.start_localSGD_iter();
  if (bucket.is_last && !is_local) ++iter_;
  // A group of one process returns at once.
  const bool keeps = is_local && !options_.post_local_gradient_allreduce();
  const comm::Group reducers = keeps ? comm::Group() : is_local ? subgroup_ : group;
  return detail::mean_async(bucket.buffer, reducers);
}

void PostLocalSGDHook::save(torch::serialize::OutputArchive& archive) const {
  archive.write("iter", c10::IValue(iter_));
}

void PostLocalSGDHook::load(torch::serialize::InputArchive& archive) {
  iter_ = read_value<std::int64_t>(archive, "iter", std::string(kPostLocalSGD) + ".load");
}

PeriodicModelAverager::PeriodicModelAverager(comm::Group group, std::int64_t period,
                                             std::int64_t warmup_steps)
    : group_(std::move(group)), period_(period), warmup_steps_(warmup_steps) {
  require_at_least(kModelAverager, "period", period, 1);
  require_at_least(kModelAverager, "number of warmup_steps", warmup_steps, 0);
}

bool PeriodicModelAverager::average_parameters(const std::vector<at::Tensor>& parameters) {
  const std::int64_t step = step_++;
  if (step < warmup_steps_ || (step - warmup_steps_) % period_ != 0) return false;
  const at::NoGradGuard no_grad;
  std::map<at::ScalarType, std::vector<at::Tensor>> lists;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.defined() || !parameter.requires_grad()) continue;
    const at::Tensor values = parameter.is_complex() ? at::view_as_real(parameter) : parameter;
    lists[values.scalar_type()].push_back(values);
  }
  for (const auto& [dtype, list] : lists) {
    at::Tensor flat = at::flatten_dense_tensors(list);
    group_.all_reduce(flat, comm::ReduceOp::mean);
    const auto means = at::unflatten_dense_tensors(flat, list);
    for (std::size_t i = 0; i < list.size(); ++i) {
      list[i].copy_(means[i]);
      settle_exact_weight(list[i]);
    }
  }
  return true;
}

void PeriodicModelAverager::save(torch::serialize::OutputArchive& archive) const {
  archive.write("step", c10::IValue(step_));
}

void PeriodicModelAverager::load(torch::serialize::InputArchive& archive) {
  step_ = read_value<std::int64_t>(archive, "step", std::string(kModelAverager) + ".load");
}

}  // namespace semitone::parallel
