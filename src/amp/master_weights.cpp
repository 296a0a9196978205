#include "semitone/amp/master_weights.h"

#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/amp/gradients.h"
#include "src/core/archive.h"
#include "src/kernels/multi_tensor.h"

#include <torch/serialize.h>
#include <torch/types.h>

#include <map>
#include <string>
#include <utility>

namespace semitone::amp {

MasterWeights::MasterWeights(torch::optim::Optimizer& optimizer, const ExactValues& exact)
    : optimizer_(&optimizer) {
  adopt(exact);
}

void MasterWeights::agreed(Pair& pair) {
  pair.parameter_version = static_cast<std::uint32_t>(pair.parameter._version());
  pair.parameter_data = pair.parameter.const_data_ptr();
  pair.master_version = static_cast<std::uint32_t>(pair.master._version());
  pair.master_data = pair.master.const_data_ptr();
}

void MasterWeights::adopt(const ExactValues& exact) {
  const at::NoGradGuard no_grad;
  for_each_parameter(*optimizer_, [&](std::size_t, std::size_t, at::Tensor& parameter) {
    if (!is_16bit(parameter.scalar_type()) || !parameter.requires_grad()) return;
    const auto known = by_parameter_.find(parameter.unsafeGetTensorImpl());
    if (known != by_parameter_.end()) {  // a tied weight that stands in the optimizer twice
      parameter = pairs_[known->second].master;
      return;
    }
    const auto value = exact.find(parameter.unsafeGetTensorImpl());
    at::Tensor master =
        value != exact.end() ? value->second.detach() : parameter.detach().to(at::kFloat);
    master.requires_grad_(true);

    auto& state = optimizer_->state();
    if (const auto entry = state.find(parameter.unsafeGetTensorImpl()); entry != state.end()) {
      auto moved = std::move(entry->second);
      state.erase(entry);
      state[master.unsafeGetTensorImpl()] = std::move(moved);
    }
    by_parameter_.emplace(parameter.unsafeGetTensorImpl(), pairs_.size());
    masters_.insert(master.unsafeGetTensorImpl());
    Pair& pair = pairs_.emplace_back(Pair{parameter, master, 0, nullptr, 0, nullptr});
    agreed(pair);
    parameter = std::move(master);  // in the optimizer's group
  });
}

bool MasterWeights::take_gradients(float inverse_scale) {
  std::vector<at::Tensor> found_inf;
  take_gradients(inverse_scale, found_inf);
  return any_found_inf(found_inf);
}

void MasterWeights::take_gradients(float inverse_scale, std::vector<at::Tensor>& found_inf) {
  Gradients gradients(inverse_scale);
  for_each([&](at::Tensor& parameter, at::Tensor& master) { gradients.move(parameter, master); });
  for_each_parameter(*optimizer_, [&](std::size_t, std::size_t, at::Tensor& parameter) {
    gradients.unscale(parameter);  // masters are known to it already
  });
  gradients.run(found_inf);
}

void MasterWeights::write_model() {
  const at::NoGradGuard no_grad;
  for (Pair& pair : pairs_) {
    pair.parameter.copy_(pair.master);
    agreed(pair);
  }
}

void MasterWeights::sync() {
  const at::NoGradGuard no_grad;
  adopt({});
  for (Pair& pair : pairs_) {
    const bool parameter_changed =
        pair.parameter_version != static_cast<std::uint32_t>(pair.parameter._version()) ||
        pair.parameter_data != pair.parameter.const_data_ptr();
    const bool master_changed =
        pair.master_version != static_cast<std::uint32_t>(pair.master._version()) ||
        pair.master_data != pair.master.const_data_ptr();
    if (parameter_changed) {
      pair.master.copy_(pair.parameter);
    } else if (master_changed) {
      pair.parameter.copy_(pair.master);
    }
    if (parameter_changed || master_changed) agreed(pair);
  }
}

void MasterWeights::clear_gradients() {
  for (Pair& pair : pairs_) pair.master.mutable_grad().reset();
}

at::Tensor MasterWeights::master_of(const at::Tensor& parameter) const {
  const auto found = by_parameter_.find(parameter.unsafeGetTensorImpl());
  return found == by_parameter_.end() ? at::Tensor() : pairs_[found->second].master;
}

void MasterWeights::set(const at::Tensor& parameter, const at::Tensor& value) {
  const at::NoGradGuard no_grad;
  const auto found = by_parameter_.find(parameter.unsafeGetTensorImpl());
  if (found == by_parameter_.end()) {
    throw Error("amp.master_weights", "a parameter that has a master", "one that has none");
  }
  Pair& pair = pairs_[found->second];
  pair.master.copy_(value);
  pair.parameter.copy_(pair.master);
  agreed(pair);
}

void MasterWeights::save(torch::serialize::OutputArchive& archive) const {
  archive.write("size", c10::IValue(static_cast<std::int64_t>(pairs_.size())));
  for (std::size_t i = 0; i < pairs_.size(); ++i)
    archive.write(std::to_string(i), pairs_[i].master.detach());
}

void MasterWeights::load(torch::serialize::InputArchive& archive) {
  constexpr auto kWhere = "amp.master_weights.load";
  sync();
  const auto size = read_value<std::int64_t>(archive, "size", kWhere);
  if (size != static_cast<std::int64_t>(pairs_.size())) {
    throw FileError(kWhere, std::to_string(pairs_.size()) + " master weights", std::to_string(size),
                    "was it saved from the same model and optimizer, at the same opt level?");
  }
  std::vector<at::Tensor> values;
  for (std::size_t i = 0; i < pairs_.size(); ++i) {
    values.push_back(read_value<at::Tensor>(archive, std::to_string(i), kWhere));
    if (values.back().sizes() != pairs_[i].master.sizes()) {
      throw FileError(kWhere, c10::str("a master weight of shape ", pairs_[i].master.sizes()),
                      c10::str(values.back().sizes(), " as number ", i),
                      "was it saved from the same model?");
    }
  }
  for (std::size_t i = 0; i < pairs_.size(); ++i) set(pairs_[i].parameter, values[i]);
}

}  // namespace semitone::amp
