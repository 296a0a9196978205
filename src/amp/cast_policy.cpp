#include "semitone/amp/cast_policy.h"

#include "semitone/core/device.h"
#include "semitone/core/dtype.h"
#include "semitone/core/error.h"
#include "src/amp/compiled_policy.h"
#include "src/amp/dispatch.h"
#include "src/amp/emulation.h"
#include "src/amp/op_names.h"
#include "src/amp/presets/presets.h"

#include <fnmatch.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <set>
#include <span>
#include <string>
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
}

struct CastPolicy::Binding {
  std::vector<BoundParameter> parameters;
};

struct CastPolicy::Compiled {
  std::once_flag once;
  std::shared_ptr<const CompiledPolicy> policy;
};

CastPolicy::CastPolicy(std::string name, CastTarget target)
    : name_(std::move(name)), target_(target), compiled_(std::make_shared<Compiled>()) {}

void CastPolicy::edited() {
  compiled_ = std::make_shared<Compiled>();
}

class PolicyBuilder {
 public:
  static CastPolicy build(std::string name, CastTarget target,
                          std::span<const presets::Rows> rows) {
    CastPolicy policy(std::move(name), target);
    for (const presets::Rows& group : rows) {
      for (const std::string_view op : group.ops) add(policy, op, group.action);
    }
    return policy;
  }

  // Like build, for a table whose names are complete: "prod" is the overload without a name and no
  // other.
  static CastPolicy build_exact(std::string name, CastTarget target,
                                std::span<const presets::Rows> rows) {
    CastPolicy policy(std::move(name), target);
    const auto stock = stock_operators(target.device);
    const std::set<std::string_view> registered(stock.begin(), stock.end());
    for (const presets::Rows& group : rows) {
      for (const std::string_view op : group.ops) {
        if (registered.count(op) > 0) insert(policy, std::string(op), group.action);
      }
    }
    return policy;
  }

 private:
  static void add(CastPolicy& policy, std::string_view name, CastAction action) {
    static const auto* const overloads =
        new std::map<std::string, std::vector<c10::OperatorHandle>>(all_operators());
    const auto found = overloads->find(std::string(name));
    if (found == overloads->end()) return;  // not in this version of LibTorch
    const bool only_writing =
        std::all_of(found->second.begin(), found->second.end(), writes_to_argument);
    for (const auto& op : found->second) {
      if (only_writing || !writes_to_argument(op))
        insert(policy, display_name(op.operator_name()), action);
    }
  }

  static std::map<std::string, std::vector<c10::OperatorHandle>> all_operators() {
    std::map<std::string, std::vector<c10::OperatorHandle>> by_base;
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
      const auto op = dispatcher.findSchema(name);
      if (op.has_value()) by_base[base_of(display_name(name))].push_back(*op);
    }
    return by_base;
  }

  static std::string base_of(const std::string& name) { return name.substr(0, name.find('.')); }

  static void insert(CastPolicy& policy, const std::string& name, CastAction action) {
    policy.rows_[name] = {action, std::string(presets::reason(action, base_of(name)))};
  }
};

CastPolicy CastPolicy::semitone(CastTarget target) {
  if (target.device == c10::DeviceType::CPU)
    return PolicyBuilder::build("semitone", target, presets::semitone_cpu());
  CastPolicy policy = torch(target);
  policy.name_ = "semitone";
  return policy;
}

CastPolicy CastPolicy::torch(CastTarget target) {
  return PolicyBuilder::build_exact(
      "torch", target,
      target.device == c10::DeviceType::CPU ? presets::torch_cpu() : presets::torch_cuda());
}

CastPolicy CastPolicy::apex(CastTarget target) {
  return PolicyBuilder::build("apex", target, presets::apex());
}

CastPolicy CastPolicy::paddle(CastTarget target, PaddleLevel level) {
  return level == PaddleLevel::O1 ? PolicyBuilder::build("paddle", target, presets::paddle_o1())
                                  : PolicyBuilder::build("paddle-o2", target, presets::paddle_o2());
}

CastPolicy CastPolicy::none(CastTarget target) {
  return CastPolicy("none", target);
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
  for (const auto& handle : resolve_operators(op, "amp.cast_policy")) {
    const std::string name = display_name(handle.operator_name());
    if (writes_to_argument(handle) && action != CastAction::ban && action != CastAction::leave) {
      throw Error("amp.cast_policy", "an out-of-place operator to cast",
                  "'" + name + "', which writes to its argument",
                  "name the out-of-place form; an in-place one can only be banned or left");
    }
    rows_[name] = {action, std::string(reason)};
  }
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

CastPolicy& CastPolicy::keep_fp32_params(std::string_view glob) {
  if (glob.empty()) throw Error("amp.cast_policy", "a glob of parameter names", "an empty one");
  globs_.emplace_back(glob);
  edited();
  return *this;
}

CastPolicy& CastPolicy::emulation(Emulation value) {
  emulation_ = value;
  edited();
  return *this;
}

bool CastPolicy::keeps_fp32(const at::Tensor& parameter) const {
  return compiled()->keeps_fp32(parameter);
}

CastPolicy CastPolicy::with_target(CastTarget target) const {
  CastPolicy policy = *this;
  policy.target_ = target;
  policy.edited();
  return policy;
}

std::optional<CastRow> CastPolicy::find(std::string_view op) const {
  const auto found = rows_.find(std::string(op));
  return found == rows_.end() ? std::nullopt : std::optional(found->second);
}

CastPolicy CastPolicy::bind(const Model& model) const {
  return bind(std::vector<Model>{model});
}

CastPolicy CastPolicy::bind(const std::vector<Model>& models) const {
  auto binding = std::make_shared<Binding>();
  std::set<std::string> unmatched(globs_.begin(), globs_.end());
  std::vector<std::string> names;
  for (const Model& model : models) {
    for (const Model::Entry& entry : model.entries()) {
      if (!entry.is_parameter) continue;
      bool keep = false;
      for (const std::string& glob : globs_) {
        if (fnmatch(glob.c_str(), entry.name.c_str(), 0) != 0) continue;
        keep = true;
        unmatched.erase(glob);
      }
      binding->parameters.emplace_back(entry.tensor, keep);
      names.push_back(entry.name);
    }
  }
  if (!unmatched.empty()) {
    const std::string near = nearest(*unmatched.begin(), names);
    throw Error("amp.cast_policy.bind", "a parameter that matches '" + *unmatched.begin() + "'",
                "none among " + std::to_string(names.size()) + " parameters",
                near.empty() ? (names.empty() ? "" : "the first is called '" + names.front() + "'")
                             : "did you mean " + near + "?");
  }
  CastPolicy bound = *this;
  bound.binding_ = std::move(binding);
  bound.edited();
  return bound;
}

namespace {

// _cudnn_rnn's own kernel in LibTorch rebuilds the flat weight buffer that cuDNN wants: a plain
// cast would not do.
constexpr std::string_view kKeepStockKernel = "_cudnn_rnn";

// Whether the operator needs a kernel of ours to behave as the row says. LibTorch's own will do
// where it has one of the same effect, but for `lower`: its weight cache can be stale, and mixes
// dtypes.
bool needs_kernel(const std::string& op, CastAction action, const CastPolicy& stock) {
  const auto own = stock.find(op);
  if (op == kKeepStockKernel && own.has_value() && own->action == action) return false;
  return action == CastAction::lower || !own.has_value() || own->action != action;
}

}  // namespace

std::shared_ptr<const CompiledPolicy> CastPolicy::compiled() const {
  std::call_once(compiled_->once, [this] {
    auto policy = std::make_shared<CompiledPolicy>(name_, target_, emulation_);
    const CastPolicy stock = torch(target_);
    const auto add = [&](const std::string& name, CastAction action, bool install) {
      const auto op = find_operator(name);
      if (!op.has_value()) return;
      policy->set_action(op_id(*op), action);
      if (install) install_kernel(*op, target_.device);
    };
    for (const auto& [name, row] : rows_) {
      add(name, row.action, !globs_.empty() || needs_kernel(name, row.action, stock));
    }
    // What LibTorch would cast by itself and this policy does not list has to be left alone.
    for (const std::string& name : stock_operators(target_.device)) {
      if (rows_.count(name) == 0) add(name, CastAction::leave, true);
    }
    if (policy->emulates(at::kHalf) || policy->emulates(at::kBFloat16)) {
      for (const std::string& name : matrix_products()) {
        for (const auto& op : resolve_operators(name, "amp.cast_policy"))
          install_kernel(op, target_.device);
      }
    }
    if (binding_ != nullptr) {
      for (const BoundParameter& parameter : binding_->parameters) policy->add(parameter);
    }
    compiled_->policy = std::move(policy);
  });
  return compiled_->policy;
}

}  // namespace semitone::amp
