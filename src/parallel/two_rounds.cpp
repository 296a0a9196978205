#include "src/parallel/two_rounds.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/core/archive.h"
#include "src/parallel/averaging.h"

#include <ATen/OpMathType.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/types.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <functional>
#include <limits>
#include <utility>

namespace semitone::parallel::detail {

struct TwoRounds::Active {
  std::shared_ptr<Exchange> exchange;
  std::vector<std::size_t> parameters;
  at::Tensor gradients;
  FuturePtr message;  // in progress
  FuturePtr result;
  Exchange::Outcome outcome;
  std::atomic<bool> ended = false;

  void finish(c10::ivalue::Future& done) {
    if (ended.exchange(true)) return;
    try {
      done.value();  // throws if it failed
      const at::NoGradGuard no_grad;
      const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
      outcome = exchange->finish(gradients);
      outcome.finite = outcome.finite.logical_and(gradients.isfinite().all());
      gradients.masked_fill_(outcome.finite.logical_not(),
                             std::numeric_limits<double>::quiet_NaN());
    } catch (const std::exception&) {
      result->setError(std::current_exception());
      return;
    }
    result->markCompleted(gradients);
  }

  void fail(const std::exception_ptr& error) {
    if (!ended.exchange(true)) result->setError(error);
  }
};

TwoRounds::TwoRounds(const std::vector<at::Tensor>& parameters, TwoRoundsOptions options)
    : options_(std::move(options)), parameters_(parameters), errors_(parameters.size()) {
  for (std::size_t place = 0; place < parameters_.size(); ++place) {
    if (!parameters_[place].defined())
      throw Error(options_.component, "parameters", "an undefined tensor");
    places_.emplace(parameters_[place].unsafeGetTensorImpl(), place);
  }
}

FuturePtr TwoRounds::reduce(const GradientBucket& bucket, const comm::Group& group) {
  const at::NoGradGuard no_grad;
  // The region in which a program calls backward() would round the factors to 16 bits.
  const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
  if (bucket.index == 0) begin_pass();
  try {
    // Also in plain passes: a training must not fail only when the compression begins.
    std::vector<std::size_t> places = places_of(bucket);
    if (passes_ < options_.plain_passes) return reduce_plainly(bucket, group);
    // A parameter without elements may have a bucket of its own.
    FuturePtr result = bucket.buffer.numel() == 0 ? completed_with(bucket.buffer)
                                                  : start(bucket, std::move(places), group);
    if (bucket.is_last) {
      if (waiting_ != nullptr) proceed(std::exchange(waiting_, nullptr), group);
      is_whole_ = true;
      ++passes_;
    }
    return result;
  } catch (const std::exception&) {
    for (const auto& active : active_) active->fail(std::current_exception());
    active_.clear();
    waiting_.reset();
    throw;
  }
}

// The places of a bucket's parameters in the hook's list. Error for those that it cannot compress.
std::vector<std::size_t> TwoRounds::places_of(const GradientBucket& bucket) const {
  std::vector<std::size_t> places;
  places.reserve(bucket.parameters.size());
  for (const at::Tensor& parameter : bucket.parameters) {
    if (parameter.is_complex()) {
      throw Error(options_.component, "gradients of real numbers",
                  c10::str("those of a parameter of ", dtype_name(parameter.scalar_type()),
                           " and shape ", parameter.sizes()),
                  "store it as real numbers, as torch::view_as_real returns them");
    }
    const auto place = places_.find(parameter.unsafeGetTensorImpl());
    if (place == places_.end()) {
      throw Error(options_.component, "gradients of the parameters that the hook was given",
                  c10::str("one of another parameter, of shape ", parameter.sizes()),
                  "construct the hook with model->parameters() of the same model");
    }
    places.push_back(place->second);
  }
  return places;
}

FuturePtr TwoRounds::reduce_plainly(const GradientBucket& bucket, const comm::Group& group) {
  if (bucket.is_last) ++passes_;
  return mean_async(bucket.buffer, group);
}

FuturePtr TwoRounds::start(const GradientBucket& bucket, std::vector<std::size_t> places,
                           const comm::Group& group) {
  auto active = std::make_shared<Active>();
  active->result = future_on(bucket.buffer.device());
  active->gradients = bucket.buffer;
  CompressedBucket compressed = with_errors(bucket, std::move(places), group);
  active->parameters = compressed.parameters;
  active->exchange = make_exchange(std::move(compressed));
  active_.push_back(active);
  active->message = active->exchange->start(group);
  if (waiting_ != nullptr) proceed(waiting_, group);
  waiting_ = active;
  return active->result;
}

void TwoRounds::proceed(const std::shared_ptr<Active>& active, const comm::Group& group) {
  active->message->waitAndThrow();
  active->message = active->exchange->proceed(group);
  active->message->addCallback([active](c10::ivalue::Future& done) { active->finish(done); });
}

CompressedBucket TwoRounds::with_errors(const GradientBucket& bucket,
                                        std::vector<std::size_t> places,
                                        const comm::Group& group) const {
  CompressedBucket compressed;
  compressed.index = bucket.index;
  compressed.parameters = std::move(places);
  compressed.shapes = bucket.parameters;
  compressed.ranks = group.size();
  const auto dtype = error_dtype(bucket.buffer.scalar_type());
  compressed.input = bucket.buffer.to(dtype, /*non_blocking=*/false, /*copy=*/true);
  std::int64_t start = 0;
  for (const std::size_t place : compressed.parameters) {
    const std::int64_t elements = parameters_[place].numel();
    const at::Tensor& error = errors_[place];
    if (error.defined()) compressed.input.narrow(0, start, elements).add_(error);
    start += elements;
  }
  return compressed;
}

void TwoRounds::begin_pass() {
  settle();
  waiting_.reset();
  is_whole_ = false;
}

// Makes what the last pass left the hook's state, if all of it has arrived and is finite.
void TwoRounds::settle() {
  const auto arrived = [](const auto& active) {
    return active->result->completed() && !active->result->hasError();
  };
  const bool commits = is_whole_ && std::all_of(active_.begin(), active_.end(), arrived) &&
                       std::all_of(active_.begin(), active_.end(), [](const auto& active) {
                         return active->outcome.finite.template item<bool>();
                       });
  for (const auto& active : active_) {
    if (!commits) break;
    active->exchange->commit();
    if (!options_.use_error_feedback) continue;
    std::int64_t start = 0;
    for (const std::size_t place : active->parameters) {
      const std::int64_t elements = parameters_[place].numel();
      errors_[place] = active->outcome.error.narrow(0, start, elements);
      start += elements;
    }
  }
  active_.clear();
}

void TwoRounds::set_loss_scale(double scale) {
  if (!(scale > 0) || !std::isfinite(scale)) {
    throw Error(options_.component + ".set_loss_scale", "a finite scale greater than 0",
                fmt::format("{}", scale));
  }
  settle();
  const at::NoGradGuard no_grad;
  const double before = std::exchange(loss_scale_, scale);
  if (before == 0 || before == scale) return;
  const double factor = scale / before;
  for (at::Tensor& error : errors_) {
    if (!error.defined()) continue;
    error.mul_(factor);
    drop_overflows(error);
  }
  scale_state(factor);
}

void TwoRounds::save(torch::serialize::OutputArchive& archive) {
  settle();
  archive.write("passes", c10::IValue(passes_));
  archive.write("loss_scale", c10::IValue(loss_scale_));
  for (std::size_t place = 0; place < errors_.size(); ++place) {
    if (errors_[place].defined())
      archive.write(fmt::format("error_{}", place), errors_[place].clone(), /*is_buffer=*/true);
  }
  save_state(archive);
}

TwoRounds::Common TwoRounds::read_common(torch::serialize::InputArchive& archive) const {
  const Common common{read_value<std::int64_t>(archive, "passes", load_component()),
                      read_value<double>(archive, "loss_scale", load_component())};
  if (common.passes < 0 || !(common.loss_scale >= 0) || !std::isfinite(common.loss_scale)) {
    throw FileError(load_component(), "a number of passes and a finite loss scale, or 0 for none",
                    fmt::format("{} and {}", common.passes, common.loss_scale));
  }
  return common;
}

std::vector<at::Tensor> TwoRounds::read_errors(torch::serialize::InputArchive& archive) const {
  const std::string component = load_component();
  std::vector<at::Tensor> errors(parameters_.size());
  for (std::size_t place = 0; place < errors.size(); ++place) {
    const at::Tensor& parameter = parameters_[place];
    // No backward pass would replace them.
    if (!options_.use_error_feedback) break;
    const auto error = find_value<at::Tensor>(archive, fmt::format("error_{}", place), component);
    if (!error.has_value()) continue;
    if (error->dim() != 1 || error->numel() != parameter.numel()) {
      throw FileError(component, c10::str("errors of a parameter of shape ", parameter.sizes()),
                      c10::str("a tensor of shape ", error->sizes()),
                      "construct the hook with the parameters of the saved run");
    }
    errors[place] =
        error->to(at::TensorOptions(parameter.device()), /*non_blocking=*/false, /*copy=*/true);
  }
  return errors;
}

void TwoRounds::set(const Common& common, std::vector<at::Tensor> errors,
                    const std::function<void()>& set_state) {
  for (std::size_t place = 0; place < errors.size(); ++place) {
    if (!errors[place].defined()) continue;
    errors[place] = errors[place].to(error_dtype(parameters_[place].scalar_type()));
    drop_overflows(errors[place]);
  }
  active_.clear();
  passes_ = common.passes;
  loss_scale_ = common.loss_scale;
  errors_ = std::move(errors);
  set_state();
}

void TwoRounds::load(torch::serialize::InputArchive& archive) {
  const Common common = read_common(archive);
  std::vector<at::Tensor> errors = read_errors(archive);
  const auto set_state = load_state(archive);
  set(common, std::move(errors), set_state);
}

void TwoRounds::load_resharded(std::span<torch::serialize::InputArchive> saved) {
  if (saved.empty()) throw Error(load_component(), "a state of each saved rank", "none");
  const at::NoGradGuard no_grad;
  const Common common = read_common(saved.front());
  const auto ranks = static_cast<double>(saved.size());
  // Each rank adds its errors to its gradients, of which the mean is taken. So the mean of the errors
  // is what the training still has to compensate, however it is distributed among the ranks.
  std::vector<at::Tensor> errors(parameters_.size());
  for (torch::serialize::InputArchive& archive : saved) {
    if (const Common of_rank = read_common(archive); of_rank != common) {
      throw FileError(load_component(), "ranks with the same number of passes and loss scale",
                      fmt::format("{} with {}, and {} with {}", common.passes, common.loss_scale,
                                  of_rank.passes, of_rank.loss_scale),
                      "save between two steps");
    }
    const std::vector<at::Tensor> of_rank = read_errors(archive);
    for (std::size_t place = 0; place < errors.size(); ++place) {
      if (!of_rank[place].defined()) continue;
      const at::Tensor part =
          of_rank[place].to(at::toOpMathType(of_rank[place].scalar_type())).div(ranks);
      errors[place] = errors[place].defined() ? errors[place].add_(part) : part;
    }
  }
  const auto set_state = load_resharded_state(saved, errors);
  set(common, std::move(errors), set_state);
}

FuturePtr future_on(c10::Device device) {
  std::vector<c10::Device> devices;
  if (!device.is_cpu()) devices.push_back(device);
  return c10::make_intrusive<c10::ivalue::Future>(c10::TensorType::get(), std::move(devices));
}

FuturePtr completed_with(const at::Tensor& tensor) {
  FuturePtr done = future_on(tensor.device());
  done->markCompleted(tensor);
  return done;
}

void drop_overflows(at::Tensor& errors) {
  if (errors.scalar_type() == at::kHalf) errors.masked_fill_(errors.isfinite().logical_not(), 0);
}

}  // namespace semitone::parallel::detail
