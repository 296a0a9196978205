#include "semitone/autocast/cast_policy.h"

#include "semitone/core/error.h"
#include "src/autocast/cast_policy_impl.h"
#include "src/autocast/fast_kernels.h"
#include "src/autocast/fp8_state.h"
#include "src/autocast/model_entries.h"
#include "src/autocast/op_names.h"
#include "src/autocast/parameter_globs.h"

#include <cstddef>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace semitone::amp {

CastPolicy::CastPolicy(std::string name, CastTarget target, std::shared_ptr<const Preset> preset)
    : name_(std::move(name)),
      target_(target),
      preset_(std::move(preset)),
      compiled_(std::make_shared<Compiled>()) {}

void CastPolicy::edited() {
  compiled_ = std::make_shared<Compiled>();
}

CastPolicy& CastPolicy::set(std::string_view op, CastAction action, std::string_view reason) {
  Rows edits = edits_;
  for (const auto& handle : resolve_operators(op, "amp.cast_policy")) {
    const std::string name = display_name(handle.operator_name());
    if (writes_to_argument(handle) && action != CastAction::ban && action != CastAction::leave) {
      throw Error("amp.cast_policy", "an out-of-place operator",
                  "'" + name + "', which writes to its argument",
                  "name the out-of-place form; in-place operators accept only ban() and leave()");
    }
    edits[name] = {action, std::string(reason)};
  }
  edits_ = std::move(edits);
  edited();
  return *this;
}

CastPolicy& CastPolicy::lower(std::string_view op, std::string_view reason) {
  return set(op, CastAction::lower, reason);
}
CastPolicy& CastPolicy::keep_fp32(std::string_view op, std::string_view reason) {
  return set(op, CastAction::fp32, reason);
}
CastPolicy& CastPolicy::promote(std::string_view op, std::string_view reason) {
  return set(op, CastAction::promote, reason);
}
CastPolicy& CastPolicy::widest(std::string_view op, std::string_view reason) {
  return set(op, CastAction::widest, reason);
}
CastPolicy& CastPolicy::leave(std::string_view op, std::string_view reason) {
  return set(op, CastAction::leave, reason);
}
CastPolicy& CastPolicy::ban(std::string_view op, std::string_view reason) {
  return set(op, CastAction::ban, reason);
}

void CastPolicy::keep_matching(Binding& binding, const std::string& glob) {
  std::vector<std::string> names;
  names.reserve(binding.size());
  for (const NamedParameter& named : binding) names.push_back(named.name);
  for (const std::size_t i : matching(glob, names, "amp.cast_policy.bind"))
    binding[i].parameter.keep_fp32 = true;
}

CastPolicy& CastPolicy::keep_fp32_params(std::string_view glob) {
  if (glob.empty()) throw Error("amp.cast_policy", "a glob of parameter names", "an empty one");
  if (binding_ != nullptr) {
    auto binding = std::make_shared<Binding>(*binding_);
    keep_matching(*binding, std::string(glob));
    binding_ = std::move(binding);
  }
  globs_.emplace_back(glob);
  edited();
  return *this;
}

CastPolicy& CastPolicy::emulation(Emulation value) {
  emulation_ = value;
  edited();
  return *this;
}

CastPolicy& CastPolicy::fast_kernel(std::string_view op, bool on) {
  const std::string name = display_name(op);
  if (find_fast_kernel(name) == nullptr) {
    std::string supported;
    for (const FastKernel& kernel : amp::fast_kernels())
      supported.append(supported.empty() ? "" : ", ").append(kernel.op);
    throw Error("amp.cast_policy", "an operator with a fast kernel", "'" + name + "'",
                "the operators with fast kernels are " + supported);
  }
  if (on) {
    fast_kernels_.insert(name);
  } else {
    fast_kernels_.erase(name);
  }
  edited();
  return *this;
}

CastPolicy& CastPolicy::fast_kernels(bool on) {
  fast_kernels_.clear();
  if (on) {
    for (const FastKernel& kernel : amp::fast_kernels()) fast_kernels_.emplace(kernel.op);
  }
  edited();
  return *this;
}

CastPolicy& CastPolicy::fast_kernels_on_gpu(bool on) {
  fast_kernels_on_gpu_ = on;
  edited();
  return *this;
}

CastPolicy& CastPolicy::fp8(const Fp8Options& options) {
  check(options);
  CastPolicy edited_policy = *this;
  edited_policy.fp8_ = options;
  edited_policy.start_fp8();
  edited_policy.edited();
  *this = std::move(edited_policy);
  return *this;
}

void CastPolicy::start_fp8() {
  if (!fp8_.has_value() || binding_ == nullptr) return;
  Fp8State::Named parameters;
  parameters.reserve(binding_->size());
  for (const NamedParameter& named : *binding_)
    parameters.emplace_back(named.name, named.parameter);
  fp8_state_ = std::make_shared<Fp8State>(*fp8_, parameters);
}

Fp8Scaling CastPolicy::fp8_scaling() const {
  if (fp8_state_ == nullptr) {
    throw Error("amp.cast_policy.fp8_scaling", "a policy with fp8() that is bound to a model",
                fp8_.has_value() ? "one that is not bound" : "one without fp8()",
                fp8_.has_value() ? "call bind(model), and use its result" : "call fp8() first");
  }
  return Fp8Scaling(fp8_state_);
}

bool CastPolicy::keeps_fp32(const at::Tensor& parameter) const {
  return compiled()->keeps_fp32(parameter);
}

CastPolicy CastPolicy::with_target(CastTarget target) const {
  CastPolicy policy = *this;
  policy.target_ = target;
  if (target.device != target_.device) policy.preset_ = by_name(name_, target).preset_;
  policy.edited();
  return policy;
}

std::optional<CastRow> CastPolicy::find(std::string_view op) const {
  const std::string name = display_name(op);
  for (const Rows* rows : {&edits_, &preset_->rows}) {
    const auto found = rows->find(name);
    if (found != rows->end()) return found->second;
  }
  return std::nullopt;
}

const CastPolicy::Rows& CastPolicy::rows() const {
  if (edits_.empty()) return preset_->rows;
  std::call_once(compiled_->rows_once, [this] {
    compiled_->rows = preset_->rows;
    for (const auto& [name, row] : edits_) compiled_->rows[name] = row;
  });
  return compiled_->rows;
}

CastPolicy CastPolicy::bind(const Model& model) const {
  return bind(std::vector<Model>{model});
}

CastPolicy CastPolicy::bind(const std::vector<Model>& models) const {
  auto binding = std::make_shared<Binding>();
  for (const Model& model : models) {
    for (const ModelEntry& entry : entries_of(model)) {
      if (entry.is_parameter) binding->push_back({entry.name, BoundParameter(entry.tensor, false)});
    }
  }
  for (const std::string& glob : globs_) keep_matching(*binding, glob);
  CastPolicy bound = *this;
  bound.binding_ = std::move(binding);
  bound.start_fp8();
  bound.edited();
  return bound;
}

}  // namespace semitone::amp
