#include "semitone/core/error.h"
#include "src/autocast/cast_policy_impl.h"
#include "src/autocast/dispatch.h"
#include "src/autocast/op_names.h"
#include "src/autocast/presets/presets.h"
#include "src/core/named_rows.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace semitone::amp {

class PolicyBuilder {
 public:
  using Rows = CastPolicy::Rows;

  static CastPolicy policy(const presets::Preset& preset, CastTarget target) {
    auto made = std::make_shared<CastPolicy::Preset>();
    const presets::Table table = preset.table(target.device);
    made->rows = table.is_exact ? exact_rows(target.device, table.rows) : rows(table.rows);
    made->as_libtorch = preset.as_libtorch;
    CastPolicy policy(std::string(preset.name), target, std::move(made));
    if (preset.fast_kernels) policy.fast_kernels(true);
    return policy;
  }

 private:
  static Rows rows(std::span<const presets::Rows> table) {
    Rows rows;
    for (const presets::Rows& group : table) {
      for (const std::string_view op : group.ops) add(rows, op, group.action);
    }
    return rows;
  }

  // Like rows, for a table with complete names: "prod" is only the overload without a name. Keeps
  // the operators for which LibTorch has a kernel.
  static Rows exact_rows(c10::DeviceType device, std::span<const presets::Rows> table) {
    Rows rows;
    const auto& stock = stock_operators(device);
    const std::set<std::string_view> registered(stock.begin(), stock.end());
    for (const presets::Rows& group : table) {
      for (const std::string_view op : group.ops) {
        if (registered.count(op) > 0) insert(rows, std::string(op), group.action);
      }
    }
    return rows;
  }

  static void add(Rows& rows, std::string_view name, CastAction action) {
    const auto found = aten_operators().find(std::string(name));
    if (found == aten_operators().end()) return;  // not in this version of LibTorch
    const bool only_writing =
        std::all_of(found->second.begin(), found->second.end(), writes_to_argument);
    for (const auto& op : found->second) {
      if (only_writing || !writes_to_argument(op))
        insert(rows, display_name(op.operator_name()), action);
    }
  }

  static void insert(Rows& rows, const std::string& name, CastAction action) {
    rows[name] = {action, std::string(presets::reason(action, name.substr(0, name.find('.'))))};
  }
};

// Presets are made once for each target, and their copies share the compiled form, since a program
// may construct one at every step.
CastPolicy CastPolicy::by_name(std::string_view name, CastTarget target) {
  const presets::Preset* const preset = find_row(presets::all(), name);
  if (preset == nullptr) {
    throw Error("amp.cast_policy", join_names(presets::all(), " or "),
                "'" + std::string(name) + "'");
  }
  using Key = std::tuple<std::string_view, c10::DeviceType, c10::ScalarType>;
  static std::mutex mutex;
  static auto* const made = new std::map<Key, CastPolicy>;
  const std::lock_guard lock(mutex);
  const Key key(preset->name, target.device, target.dtype);
  const auto found = made->find(key);
  return found != made->end()
             ? found->second
             : made->emplace(key, PolicyBuilder::policy(*preset, target)).first->second;
}

std::vector<std::string> CastPolicy::preset_names() {
  std::vector<std::string> names;
  for (const presets::Preset& preset : presets::all()) names.emplace_back(preset.name);
  return names;
}

CastPolicy CastPolicy::semitone(CastTarget target) {
  return by_name("semitone", target);
}

CastPolicy CastPolicy::torch(CastTarget target) {
  return by_name("torch", target);
}

CastPolicy CastPolicy::apex(CastTarget target) {
  return by_name("apex", target);
}

CastPolicy CastPolicy::paddle(CastTarget target, PaddleLevel level) {
  return by_name(level == PaddleLevel::O1 ? "paddle" : "paddle-o2", target);
}

CastPolicy CastPolicy::none(CastTarget target) {
  return by_name("none", target);
}

}  // namespace semitone::amp
