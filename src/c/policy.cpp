#include "src/c/policy.h"

#include "semitone/core/error.h"
#include "src/c/arguments.h"
#include "src/c/handles.h"
#include "src/c/parameters.h"

#include <optional>
#include <string>
#include <vector>

using semitone::Error;
using semitone::amp::CastAction;
using semitone::amp::CastPolicy;
using semitone::amp::CastTarget;
using semitone::amp::Emulation;
using namespace semitone::c;  // NOLINT(google-build-using-namespace)

namespace semitone::c {
namespace {

static_assert(static_cast<int>(CastAction::lower) == SEMITONE_ACTION_LOWER);
static_assert(static_cast<int>(CastAction::fp32) == SEMITONE_ACTION_FP32);
static_assert(static_cast<int>(CastAction::promote) == SEMITONE_ACTION_PROMOTE);
static_assert(static_cast<int>(CastAction::widest) == SEMITONE_ACTION_WIDEST);
static_assert(static_cast<int>(CastAction::leave) == SEMITONE_ACTION_LEAVE);
static_assert(static_cast<int>(CastAction::ban) == SEMITONE_ACTION_BAN);

CastTarget target_of(const char* device, int32_t dtype, const char* function) {
  const c10::DeviceType type = device_of(device, function).type();
  switch (dtype) {
    case SEMITONE_DEFAULT_DTYPE:
      return type;
    case SEMITONE_FLOAT16:
      return {type, at::kHalf};
    case SEMITONE_BFLOAT16:
      return {type, at::kBFloat16};
    default:
      throw Error(function, "SEMITONE_FLOAT16, SEMITONE_BFLOAT16 or SEMITONE_DEFAULT_DTYPE",
                  "the number " + std::to_string(dtype));
  }
}

}  // namespace
}  // namespace semitone::c

SemitoneStatus semitone_policy_create(const char* preset, const char* device, int32_t dtype,
                                      SemitonePolicy** policy) {
  return run(__func__, [&](const char* function) {
    require_pointer(policy, "pointer for the policy", function);
    const std::string name = string_of(preset, "name of a preset", function);
    give(std::make_unique<SemitonePolicy>(
             SemitonePolicy{CastPolicy::by_name(name, target_of(device, dtype, function))}),
         policy);
  });
}

SemitoneStatus semitone_policy_load(const char* path, const char* device, int32_t dtype,
                                    SemitonePolicy** policy) {
  return run(__func__, [&](const char* function) {
    require_pointer(policy, "pointer for the policy", function);
    const std::string file = string_of(path, "path", function);
    give(std::make_unique<SemitonePolicy>(
             SemitonePolicy{CastPolicy::from_file(file, target_of(device, dtype, function))}),
         policy);
  });
}

SemitoneStatus semitone_policy_destroy(SemitonePolicy* policy) {
  return destroy(__func__, policy);
}

SemitoneStatus semitone_policy_set(SemitonePolicy* policy, const char* op, int32_t action) {
  return run(__func__, [&](const char* function) {
    CastPolicy& edited = get(policy, function).policy;
    const std::string name = string_of(op, "name of an operator", function);
    if (action < SEMITONE_ACTION_LOWER || action > SEMITONE_ACTION_BAN) {
      throw Error(function, "an action, SEMITONE_ACTION_LOWER …",
                  "the number " + std::to_string(action));
    }
    edited.set(name, static_cast<CastAction>(action));
  });
}

SemitoneStatus semitone_policy_find(const SemitonePolicy* policy, const char* op, int32_t* action) {
  return run(__func__, [&](const char* function) {
    require_pointer(action, "pointer for the action", function);
    const auto row =
        get(policy, function).policy.find(string_of(op, "name of an operator", function));
    *action = row.has_value() ? static_cast<int32_t>(row->action) : SEMITONE_ACTION_NONE;
  });
}

SemitoneStatus semitone_policy_keep_fp32_params(SemitonePolicy* policy, const char* glob) {
  return run(__func__, [&](const char* function) {
    CastPolicy& edited = get(policy, function).policy;
    edited.keep_fp32_params(string_of(glob, "pattern of names", function));
  });
}

SemitoneStatus semitone_policy_set_emulation(SemitonePolicy* policy, const char* emulation) {
  return run(__func__, [&](const char* function) {
    CastPolicy& edited = get(policy, function).policy;
    const std::string name = string_of(emulation, "kind of emulation", function);
    for (const Emulation value : {Emulation::automatic, Emulation::always, Emulation::never}) {
      if (name != name_of(value)) continue;
      edited.emulation(value);
      return;
    }
    throw Error(function, "'automatic', 'always' or 'never'", "'" + name + "'");
  });
}

SemitoneStatus semitone_policy_set_fast_kernels(SemitonePolicy* policy, int32_t on) {
  return run(__func__,
             [&](const char* function) { get(policy, function).policy.fast_kernels(on != 0); });
}

SemitoneStatus semitone_policy_bind(SemitonePolicy* policy, const char* const* names,
                                    const SemitoneTensor* const* parameters, size_t count) {
  return run(__func__, [&](const char* function) {
    SemitonePolicy& self = get(policy, function);
    const std::vector<at::Tensor> tensors = tensors_of(parameters, count, function);
    auto module = module_of(names_of(names, count, function), tensors);
    self.policy = self.policy.bind(module);
    self.parameters = std::move(module);
  });
}

SemitoneStatus semitone_policy_save(const SemitonePolicy* policy, const char* path) {
  return run(__func__, [&](const char* function) {
    get(policy, function).policy.save(string_of(path, "path", function));
  });
}

SemitoneStatus semitone_policy_to_json(const SemitonePolicy* policy, char** json) {
  return run(__func__, [&](const char* function) {
    require_pointer(json, "pointer for the text", function);
    *json = new_string(get(policy, function).policy.to_json());
  });
}
