#include "semitone/amp/cast_policy.h"

#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "semitone/core/nearest.h"
#include "src/amp/compiled_policy.h"
#include "src/amp/dispatch.h"
#include "src/amp/emulation.h"
#include "src/amp/fast_kernels.h"
#include "src/amp/op_names.h"
#include "src/amp/presets/presets.h"

#include <ATen/autocast_mode.h>
#include <c10/util/FunctionRef.h>

#include <fnmatch.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp {

std::string_view name_of(CastAction action) {
  switch (action) {
    case CastAction::lower:
      return "lower";
    case CastAction::fp32:
      return "fp32";
    case CastAction::promote:
      return "promote";
    case CastAction::widest:
      return "widest";
    case CastAction::leave:
      return "leave";
    case CastAction::ban:
      return "ban";
  }
  return "";
}

CastTarget::CastTarget() : CastTarget(default_device()) {}
CastTarget::CastTarget(c10::DeviceType device_type)
    : CastTarget(device_type, default_16bit_dtype(device_type)) {}
CastTarget::CastTarget(c10::ScalarType lower_dtype) : CastTarget(default_device(), lower_dtype) {}
CastTarget::CastTarget(c10::DeviceType device_type, c10::ScalarType lower_dtype)
    : device(device_type), dtype(lower_dtype) {
  if (!is_16bit(dtype)) {
    throw Error("amp.cast_policy", "float16 or bfloat16 to lower to", dtype_name(dtype),
                "for fp32 leave the region out, or construct it with enabled = false");
  }
  if (!at::autocast::is_autocast_available(device)) {
    throw Error("amp.cast_policy", "a device type that LibTorch has autocast for",
                c10::DeviceTypeName(device, true));
  }
}

struct CastPolicy::NamedParameter {
  std::string name;
  BoundParameter parameter;
};

struct CastPolicy::Compiled {
  std::once_flag once;
  std::shared_ptr<const CompiledPolicy> policy;
};

CastPolicy::CastPolicy(std::string name, CastTarget target, Rows rows)
    : name_(std::move(name)),
      target_(target),
      rows_(std::make_shared<const Rows>(std::move(rows))),
      compiled_(std::make_shared<Compiled>()) {}

void CastPolicy::edited() {
  compiled_ = std::make_shared<Compiled>();
}

class PolicyBuilder {
 public:
  static CastPolicy build(std::string name, CastTarget target,
                          std::span<const presets::Rows> table) {
    CastPolicy::Rows rows;
    for (const presets::Rows& group : table) {
      for (const std::string_view op : group.ops) add(rows, op, group.action);
    }
    return {std::move(name), target, std::move(rows)};
  }

  // Like build, for a table whose names are complete: "prod" is the overload without a name and no
  // other. Keeps those that LibTorch has a kernel for.
  static CastPolicy build_exact(std::string name, CastTarget target,
                                std::span<const presets::Rows> table, bool as_libtorch) {
    CastPolicy::Rows rows;
    const auto& stock = stock_operators(target.device);
    const std::set<std::string_view> registered(stock.begin(), stock.end());
    for (const presets::Rows& group : table) {
      for (const std::string_view op : group.ops) {
        if (registered.count(op) > 0) insert(rows, std::string(op), group.action);
      }
    }
    CastPolicy policy(std::move(name), target, std::move(rows));
    policy.as_libtorch_ = as_libtorch;
    return policy;
  }

 private:
  static void add(CastPolicy::Rows& rows, std::string_view name, CastAction action) {
    static const auto* const overloads =
        new std::map<std::string, std::vector<c10::OperatorHandle>>(aten_operators());
    const auto found = overloads->find(std::string(name));
    if (found == overloads->end()) return;  // not in this version of LibTorch
    const bool only_writing =
        std::all_of(found->second.begin(), found->second.end(), writes_to_argument);
    for (const auto& op : found->second) {
      if (only_writing || !writes_to_argument(op))
        insert(rows, display_name(op.operator_name()), action);
    }
  }

  static std::map<std::string, std::vector<c10::OperatorHandle>> aten_operators() {
    std::map<std::string, std::vector<c10::OperatorHandle>> by_base;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      if (!is_aten(name)) continue;
      const auto op = dispatcher.findSchema(name);
      if (op.has_value()) by_base[base_of(display_name(name))].push_back(*op);
    }
    return by_base;
  }

  static std::string base_of(const std::string& name) { return name.substr(0, name.find('.')); }

  static void insert(CastPolicy::Rows& rows, const std::string& name, CastAction action) {
    rows[name] = {action, std::string(presets::reason(action, base_of(name)))};
  }
};

namespace {

// Presets are made once for each target, and their copies share the compiled form: a program may
// ask for one at every step.
CastPolicy preset(std::string_view name, CastTarget target, c10::function_ref<CastPolicy()> build) {
  using Key = std::tuple<std::string_view, c10::DeviceType, c10::ScalarType>;
  static std::mutex mutex;
  static auto* const made = new std::map<Key, CastPolicy>;
  const std::lock_guard lock(mutex);
  const Key key(name, target.device, target.dtype);
  const auto known = made->find(key);
  return known != made->end() ? known->second : made->emplace(key, build()).first->second;
}

}  // namespace

CastPolicy CastPolicy::semitone(CastTarget target) {
  return preset("semitone", target, [target] {
    CastPolicy policy =
        target.device == c10::DeviceType::CPU
            ? PolicyBuilder::build("semitone", target, presets::semitone_cpu())
            : PolicyBuilder::build_exact("semitone", target, presets::torch_cuda(), false);
    return policy.fast_kernels(true);
  });
}

CastPolicy CastPolicy::torch(CastTarget target) {
  return preset("torch", target, [target] {
    const bool on_cpu = target.device == c10::DeviceType::CPU;
    return PolicyBuilder::build_exact("torch", target,
                                      on_cpu ? presets::torch_cpu() : presets::torch_cuda(), true);
  });
}

CastPolicy CastPolicy::apex(CastTarget target) {
  return preset("apex", target,
                [target] { return PolicyBuilder::build("apex", target, presets::apex()); });
}

CastPolicy CastPolicy::paddle(CastTarget target, PaddleLevel level) {
  const bool first = level == PaddleLevel::O1;
  const char* const name = first ? "paddle" : "paddle-o2";
  return preset(name, target, [&] {
    return PolicyBuilder::build(name, target, first ? presets::paddle_o1() : presets::paddle_o2());
  });
}

CastPolicy CastPolicy::none(CastTarget target) {
  return CastPolicy("none", target).fast_kernels(true);
}

CastPolicy CastPolicy::by_name(std::string_view name, CastTarget target) {
  if (name == "semitone") return semitone(target);
  if (name == "torch") return torch(target);
  if (name == "apex") return apex(target);
  if (name == "paddle") return paddle(target);
  if (name == "paddle-o2") return paddle(target, PaddleLevel::O2);
  if (name == "none") return none(target);
  throw Error("amp.cast_policy", "semitone, torch, apex, paddle, paddle-o2 or none",
              "'" + std::string(name) + "'");
}

CastPolicy& CastPolicy::set(std::string_view op, CastAction action, std::string_view reason) {
  Rows rows = *rows_;
  for (const auto& handle : resolve_operators(op, "amp.cast_policy")) {
    const std::string name = display_name(handle.operator_name());
    if (writes_to_argument(handle) && action != CastAction::ban && action != CastAction::leave) {
      throw Error("amp.cast_policy", "an out-of-place operator to cast",
                  "'" + name + "', which writes to its argument",
                  "name the out-of-place form; an in-place one can only be banned or left");
    }
    rows[name] = {action, std::string(reason)};
  }
  rows_ = std::make_shared<const Rows>(std::move(rows));
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
  bool matched = false;
  std::vector<std::string> names;
  for (NamedParameter& named : binding) {
    names.push_back(named.name);
    if (fnmatch(glob.c_str(), named.name.c_str(), 0) != 0) continue;
    named.parameter.keep_fp32 = true;
    matched = true;
  }
  if (matched) return;
  const std::string near = nearest(glob, names);
  throw Error("amp.cast_policy.bind", "a parameter that matches '" + glob + "'",
              "none among " + std::to_string(names.size()) + " parameters",
              near.empty() ? (names.empty() ? "" : "the first is called '" + names.front() + "'")
                           : "did you mean " + near + "?");
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
    std::string known;
    for (const FastKernel& kernel : amp::fast_kernels())
      known.append(known.empty() ? "" : ", ").append(kernel.op);
    throw Error("amp.cast_policy", "an operator that has a fast kernel", "'" + name + "'",
                "there are some for " + known);
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

bool CastPolicy::keeps_fp32(const at::Tensor& parameter) const {
  return compiled()->keeps_fp32(parameter);
}

CastPolicy CastPolicy::with_target(CastTarget target) const {
  CastPolicy policy = *this;
  policy.target_ = target;
  policy.as_libtorch_ = as_libtorch_ && target.device == target_.device;
  policy.edited();
  return policy;
}

std::optional<CastRow> CastPolicy::find(std::string_view op) const {
  const auto found = rows_->find(display_name(op));
  return found == rows_->end() ? std::nullopt : std::optional(found->second);
}

CastPolicy CastPolicy::bind(const Model& model) const {
  return bind(std::vector<Model>{model});
}

CastPolicy CastPolicy::bind(const std::vector<Model>& models) const {
  auto binding = std::make_shared<Binding>();
  for (const Model& model : models) {
    for (const Model::Entry& entry : model.entries()) {
      if (entry.is_parameter) binding->push_back({entry.name, BoundParameter(entry.tensor, false)});
    }
  }
  for (const std::string& glob : globs_) keep_matching(*binding, glob);
  CastPolicy bound = *this;
  bound.binding_ = std::move(binding);
  bound.edited();
  return bound;
}

std::shared_ptr<const CompiledPolicy> CastPolicy::compiled() const {
  std::call_once(compiled_->once, [this] {
    auto policy = std::make_shared<CompiledPolicy>(name_, target_, emulation_, as_libtorch_);
    install_stock_kernels(target_.device);
    for (const auto& [name, row] : *rows_) {
      const auto op = find_operator(name);
      if (!op.has_value()) continue;  // a library that was unloaded since
      policy->set_action(op_id(*op), row.action);
      install_kernel(*op, target_.device);
    }
    if (target_.device == c10::DeviceType::CPU) {
      for (const std::string& name : fast_kernels_) {
        const auto op = find_operator(name);
        if (!op.has_value()) continue;  // not in this version of LibTorch
        policy->use_fast_kernel(op_id(*op));
        install_kernel(*op, target_.device);
      }
    }
    if (rows_->empty()) policy->lower_mixed();
    if (policy->emulates_any() || policy->lowers_mixed()) {
      for (const auto& op : matrix_products()) install_kernel(op, target_.device);
    } else if (policy->repairs()) {
      for (const auto& op : convolutions()) install_kernel(op, target_.device);
    }
    if (binding_ != nullptr) {
      for (const NamedParameter& named : *binding_) policy->add(named.parameter);
    }
    if (binding_ != nullptr && !globs_.empty()) {
      const auto keep = [&](const Rows& rows) {
        for (const auto& [name, row] : rows) {
          const auto op = find_operator(name);
          if (!op.has_value() || writes_to_argument(*op)) continue;  // the write would go to a copy
          policy->keep_operator(op_id(*op));
          install_kernel(*op, target_.device);
        }
      };
      keep(*rows_);
      keep(semitone(target_).rows());
    }
    compiled_->policy = std::move(policy);
  });
  return compiled_->policy;
}

}  // namespace semitone::amp
