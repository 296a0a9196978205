// cast_lists.json: the lists of LibTorch, Apex and Paddle against our presets, name by name.

#include "semitone/autocast/cast_policy.h"
#include "src/autocast/dispatch.h"
#include "src/autocast/op_names.h"
#include "src/core/libtorch_release.h"
#include "tests/support/conformance.h"

#include <ATen/autocast_mode.h>
#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace semitone::test {
namespace {

using amp::CastAction;
using amp::CastPolicy;
using nlohmann::json;
using testing::IsEmpty;
using Names = std::vector<std::string>;

// ---- LibTorch ----------------------------------------------------------------------------------

// The operators that LibTorch itself registers on a device's Autocast key. Read before main(), when
// no kernel of Semitone is registered yet.
std::set<std::string> registered(c10::DeviceType device) {
  const auto key = at::autocast::get_autocast_dispatch_key_from_device_type(device);
  std::set<std::string> names;
  for (const auto& name : c10::Dispatcher::singleton().getRegistrationsForDispatchKey(key)) {
    if (amp::is_aten(name) && c10::Dispatcher::singleton().findSchema(name).has_value())
      names.insert(amp::display_name(name));
  }
  return names;
}

const std::map<c10::DeviceType, std::set<std::string>> kRegistered{
    {torch::kCPU, registered(torch::kCPU)}, {torch::kCUDA, registered(torch::kCUDA)}};

CastAction action_of(const std::string& list) {
  if (list == "lower" || list == "own_kernel") return CastAction::lower;
  if (list.rfind("fp32", 0) == 0)
    return CastAction::fp32;  // and its variants with a dtype argument
  if (list == "promote") return CastAction::promote;
  if (list == "banned") return CastAction::ban;
  throw std::runtime_error("cast_lists.json: unknown list " + list);
}

using Actions = std::map<std::string, CastAction>;

void add_lists(Actions& actions, const json& lists) {
  for (const auto& [list, names] : lists.items()) {
    for (const json& name : names) actions.emplace(name, action_of(list));
  }
}

// The lists of the LibTorch that runs.
Actions torch_lists(const json& data, c10::DeviceType device) {
  const bool on_cpu = device == torch::kCPU;
  Actions actions;
  add_lists(actions, data.at(on_cpu ? "torch_cpu" : "torch_cuda"));
  if (!on_cpu) add_lists(actions, data.at("torch_cuda_outside_macros"));
#if SEMITONE_LIBTORCH_SINCE(2, 15)
  const json& newer = data.at("torch_newer");
  if (on_cpu) {
    for (const json& name : newer.at("cpu_added")) actions.emplace(name, CastAction::fp32);
    for (const json& name : newer.at("cpu_removed")) actions.erase(name);
  } else {
    add_lists(actions, newer.at("cuda_added"));
    for (const auto& [list, names] : newer.at("cuda_removed").items()) {
      for (const json& name : names) actions.erase(name);
    }
  }
#endif
  // LibTorch 2.15 registers it for CUDA too, past the macros that the lists were read from.
  if (kRegistered.at(device).count("linalg_matrix_sqrth") > 0)
    actions.emplace("linalg_matrix_sqrth", CastAction::fp32);
  // Its kernel is in libtorch_cuda, which need not be there.
  if (kRegistered.at(device).count("_cudnn_rnn") == 0) actions.erase("_cudnn_rnn");
  return actions;
}

Actions actions_of(const CastPolicy& policy) {
  Actions actions;
  for (const auto& [name, row] : policy.rows()) actions.emplace(name, row.action);
  return actions;
}

std::string describe(const Actions& actions, const Actions& without) {
  std::string text;
  for (const auto& [name, action] : actions) {
    const auto other = without.find(name);
    if (other == without.end() || other->second != action)
      text.append(" ").append(name).append("=").append(amp::name_of(action));
  }
  return text;
}

class TorchLists : public testing::TestWithParam<c10::DeviceType> {};

TEST_P(TorchLists, PresetTorchHasExactlyThePublishedRows) {
  const Actions want = torch_lists(conformance("cast_lists.json"), GetParam());
  const Actions got = actions_of(CastPolicy::torch(GetParam()));
  EXPECT_EQ(describe(want, got), "") << "missing or with another action";
  EXPECT_EQ(describe(got, want), "") << "not published";
}

TEST_P(TorchLists, PresetTorchHasExactlyTheOperatorsThatLibTorchHasKernelsFor) {
  std::set<std::string> got;
  for (const auto& [name, row] : CastPolicy::torch(GetParam()).rows()) got.insert(name);
  const std::set<std::string>& want = kRegistered.at(GetParam());
  Names either;
  std::set_symmetric_difference(got.begin(), got.end(), want.begin(), want.end(),
                                std::back_inserter(either));
  EXPECT_THAT(either, IsEmpty());
}

TEST_P(TorchLists, StockOperatorsAreTakenBeforeOursAreInstalled) {
  CastPolicy::semitone(GetParam()).compiled();
  const auto& stock = amp::stock_operators(GetParam());
  EXPECT_EQ(std::set<std::string>(stock.begin(), stock.end()), kRegistered.at(GetParam()));
}

INSTANTIATE_TEST_SUITE_P(Devices, TorchLists, testing::Values(torch::kCPU, torch::kCUDA),
                         [](const auto& tested) { return c10::DeviceTypeName(tested.param); });

// ---- Apex and Paddle: names of Python functions ------------------------------------------------

// A peer's name -> the ATen operators that do its work in C++. A name that is missing here is
// looked up in ATen unchanged. An empty list means that there is no counterpart, for the reason in
// the comment.
using Counterparts = std::map<std::string, Names>;

const Names kUpsampling{"upsample_nearest1d",  "upsample_nearest2d",  "upsample_nearest3d",
                        "upsample_linear1d",   "upsample_bilinear2d", "upsample_bicubic2d",
                        "upsample_trilinear3d"};

const Counterparts& apex_counterparts() {
  static const Counterparts table{
      {"cross_entropy", {"cross_entropy_loss"}},
      {"grid_sample", {"grid_sampler"}},
      {"interpolate", kUpsampling},
      {"nll_loss", {"nll_loss", "nll_loss2d", "nll_loss_nd"}},
      {"softmin", {"softmax"}},
      {"__add__", {"add"}},
      {"__div__", {"div"}},
      {"__eq__", {"eq"}},
      {"__ge__", {"ge"}},
      {"__gt__", {"gt"}},
      {"__le__", {"le"}},
      {"__lt__", {"lt"}},
      {"__matmul__", {"matmul"}},
      {"__mul__", {"mul"}},
      {"__ne__", {"ne"}},
      {"__pow__", {"pow"}},
      {"__radd__", {"add"}},
      {"__rdiv__", {"div"}},
      {"__rmul__", {"mul"}},
      {"__rpow__", {"pow"}},
      {"__rsub__", {"rsub"}},
      {"__rtruediv__", {"div"}},
      {"__sub__", {"sub"}},
      {"__truediv__", {"div"}},
      // In Python they rebind the name to a new tensor; in C++ they write in place, in self's
      // dtype.
      {"__iadd__", {}},
      {"__idiv__", {}},
      {"__imul__", {}},
      {"__ipow__", {}},
      {"__isub__", {}},
      {"__itruediv__", {}},
      // A copy to another device, and not an operator of ATen.
      {"cpu", {}},
      // Functions of the C++ frontend that are made of listed operators.
      {"local_response_norm", {}},
      {"multilabel_soft_margin_loss", {}},
      {"normalize", {}},
  };
  return table;
}

const Counterparts& paddle_counterparts() {
  static const Counterparts table{
      {"bicubic_interp_v2", {"upsample_bicubic2d"}},
      {"bilinear_interp_v2", {"upsample_bilinear2d"}},
      {"cast", {"to"}},
      {"concat", {"cat"}},
      {"cross_entropy", {"nll_loss", "nll_loss2d"}},  // of probabilities
      {"cross_entropy2", {"nll_loss", "nll_loss2d"}},
      {"elementwise_add", {"add"}},
      {"elementwise_div", {"div"}},
      {"elementwise_floordiv", {"floor_divide"}},
      {"elementwise_max", {"maximum"}},
      {"elementwise_min", {"minimum"}},
      {"elementwise_mod", {"remainder"}},
      {"elementwise_mul", {"mul"}},
      {"elementwise_sub", {"sub"}},
      {"fill_constant", {"full"}},
      {"flash_attn", {"scaled_dot_product_attention"}},
      {"flatten2", {"flatten"}},
      {"fused_gemm_epilogue", {"linear", "addmm"}},
      {"linear_interp_v2", {"upsample_linear1d"}},
      {"linear_v2", {"linear"}},
      {"log_loss", {"binary_cross_entropy"}},
      {"lookup_table", {"embedding"}},
      {"lookup_table_v2", {"embedding"}},
      {"matmul_v2", {"matmul", "mm", "bmm", "mv"}},
      {"max_pool2d_with_index", {"max_pool2d", "max_pool2d_with_indices"}},
      {"mul", {"matmul", "mm"}},  // a matrix product; the other one is elementwise_mul
      {"nearest_interp_v2", {"upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"}},
      {"nll_loss", {"nll_loss", "nll_loss2d", "nll_loss_nd"}},
      {"pnorm", {"norm", "linalg_vector_norm"}},
      {"pool2d", {"avg_pool2d"}},
      {"pool3d", {"avg_pool3d"}},
      {"reduce_mean", {"mean"}},
      {"reduce_prod", {"prod"}},
      {"reduce_sum", {"sum"}},
      {"reshape2", {"reshape"}},
      {"scale", {"mul"}},
      {"sigmoid_cross_entropy_with_logits", {"binary_cross_entropy_with_logits"}},
      {"softmax_with_cross_entropy", {"cross_entropy_loss"}},
      {"softmin", {"softmax"}},
      {"top_k", {"topk"}},
      {"transpose2", {"transpose"}},
      {"trilinear_interp_v2", {"upsample_trilinear3d"}},
      {"unstack", {"unbind"}},
      // pow is on the black list under its own name; the gray entry is the one with a tensor
      // exponent.
      {"elementwise_pow", {}},
      // Collective operators and program structure: LibTorch has no operator of the kind.
      {"all_reduce", {}},
      {"c_concat", {}},
      {"c_identity", {}},
      {"c_softmax_with_cross_entropy", {}},
      {"c_softmax_with_multi_label_cross_entropy", {}},
      {"get_tensor_from_selected_rows", {}},
      {"margin_cross_entropy", {}},
      {"rank", {}},
      // Fused layers that LibTorch has no operator for.
      {"fake_quantize_dequantize_abs_max", {}},
      {"fake_quantize_dequantize_moving_average_abs_max", {}},
      {"fused_attention", {}},
      {"fused_bn_add_activation", {}},
      {"fused_feedforward", {}},
      {"fused_multi_transformer", {}},
      {"fused_rotary_position_embedding", {}},
      {"resnet_unit", {}},
      // Losses and functions that LibTorch does not have, or makes of others.
      {"hsigmoid_loss", {}},
      {"soft_relu", {}},
      {"tanh_shrink", {}},
      // Fill a tensor in place.
      {"gaussian_random", {}},
      {"uniform_random", {}},
      {"uniform_random_batch_size_like", {}},
  };
  return table;
}

// All overloads that can be cast, by base name; of operators that only write, those.
const std::map<std::string, Names>& aten_operators() {
  static const auto* const by_base = [] {
    auto* const map = new std::map<std::string, Names>;
    std::map<std::string, Names> writing;
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!amp::is_aten(name) || !op.has_value()) continue;
      const std::string full = amp::display_name(name);
      const std::string base = full.substr(0, full.find('.'));
      (amp::writes_to_argument(*op) ? writing : *map)[base].push_back(full);
    }
    map->merge(writing);
    return map;
  }();
  return *by_base;
}

// The ATen operators of a peer's name, or nothing if it is neither mapped nor listed nor an ATen
// name.
std::optional<Names> counterparts(const Counterparts& table, const std::string& peer) {
  const auto mapped = table.find(peer);
  Names names;
  for (const std::string& base : mapped != table.end() ? mapped->second : Names{peer}) {
    const auto overloads = aten_operators().find(base);
    if (overloads == aten_operators().end()) return std::nullopt;
    names.insert(names.end(), overloads->second.begin(), overloads->second.end());
  }
  return names;
}

std::optional<CastAction> action_in(const CastPolicy& policy, const std::string& op) {
  const auto row = policy.find(op);
  return row.has_value() ? std::optional(row->action) : std::nullopt;
}

void expect_action(const CastPolicy& policy, const Counterparts& table, const json& peers,
                   CastAction action) {
  for (const json& peer : peers) {
    const auto ops = counterparts(table, peer);
    EXPECT_TRUE(ops.has_value()) << peer << " is neither mapped, nor listed, nor in ATen";
    for (const std::string& op : ops.value_or(Names{})) {
      EXPECT_EQ(action_in(policy, op), std::optional(action)) << peer << ", which is " << op;
    }
  }
}

TEST(PeerLists, ApexFunctionsHaveTheirActions) {
  const json data = conformance("cast_lists.json");
  for (const auto device : {torch::kCPU, torch::kCUDA}) {
    const auto policy = CastPolicy::apex({device, torch::kHalf});
    SCOPED_TRACE(c10::DeviceTypeName(device));
    for (const auto& [module, lists] : data.at("apex").items()) {
      SCOPED_TRACE(module);
      expect_action(policy, apex_counterparts(), lists.at("half"), CastAction::lower);
      expect_action(policy, apex_counterparts(), lists.at("float"), CastAction::fp32);
      expect_action(policy, apex_counterparts(), lists.at("promote"), CastAction::widest);
      expect_action(policy, apex_counterparts(), lists.at("sequence_promote"), CastAction::widest);
      expect_action(policy, apex_counterparts(), lists.at("banned"), CastAction::ban);
    }
    for (const auto& [kind, names] : data.at("apex_rnn").items())
      expect_action(policy, apex_counterparts(), names, CastAction::lower);
  }
}

// Apex refuses the in-place form of every function on its float list.
TEST(PeerLists, ApexBansTheInPlaceFormsOfItsFloatList) {
  const json data = conformance("cast_lists.json");
  const auto policy = CastPolicy::apex(torch::kCPU);
  for (const auto& [module, lists] : data.at("apex").items()) {
    if (module == "functional") continue;
    for (const json& name : lists.at("float")) {
      const auto in_place = aten_operators().find(name.get<std::string>() + "_");
      if (in_place == aten_operators().end()) continue;
      for (const std::string& op : in_place->second)
        EXPECT_EQ(action_in(policy, op), CastAction::ban) << op;
    }
  }
}

TEST(PeerLists, PaddlesEagerListsHaveTheirActionsAtBothLevels) {
  const json data = conformance("cast_lists.json");
  for (const auto& [dtype, lists] : data.at("paddle_eager").items()) {
    SCOPED_TRACE(dtype);
    const amp::CastTarget target(torch::kCPU, dtype == "float16" ? torch::kHalf : torch::kBFloat16);
    for (const auto& [level, policy] :
         {std::pair<const char*, CastPolicy>{"O1", CastPolicy::paddle(target)},
          {"O2", CastPolicy::paddle(target, amp::PaddleLevel::O2)}}) {
      SCOPED_TRACE(level);
      expect_action(policy, paddle_counterparts(), lists.at("white").at(level), CastAction::lower);
      expect_action(policy, paddle_counterparts(), lists.at("black").at(level), CastAction::fp32);
    }
  }
}

TEST(PeerLists, PaddlesExtraBlackListIsWhatRemainsInFp32AtO2) {
  const json data = conformance("cast_lists.json");
  std::set<std::string> want;
  for (const json& peer : data.at("paddle_extra_black")) {
    for (const auto& op : counterparts(paddle_counterparts(), peer).value_or(Names{}))
      want.insert(op);
  }
  const auto policy = CastPolicy::paddle(torch::kCPU, amp::PaddleLevel::O2);
  for (const auto& [op, row] : policy.rows()) {
    // Paddle's one interpolation operator has an antialias attribute; in ATen it is another name.
    if (row.action != CastAction::fp32 || op.rfind("_upsample", 0) == 0) continue;
    EXPECT_EQ(want.count(op), 1U) << op;
  }
  for (const std::string& op : want) EXPECT_EQ(action_in(policy, op), CastAction::fp32) << op;
}

TEST(PeerLists, PaddlesStaticListsHaveTheirActionsAndGrayIsNotListed) {
  const json data = conformance("cast_lists.json");
  for (const auto& [dtype, lists] : data.at("paddle_static").items()) {
    SCOPED_TRACE(dtype);
    const auto policy = CastPolicy::paddle(torch::kCPU);
    expect_action(policy, paddle_counterparts(), lists.at("white"), CastAction::lower);
    expect_action(policy, paddle_counterparts(), lists.at("black"), CastAction::fp32);
    const json& black = lists.at("black");
    for (const json& peer : lists.at("gray")) {
      if (std::find(black.begin(), black.end(), peer) != black.end()) continue;  // black wins
      const auto ops = counterparts(paddle_counterparts(), peer);
      EXPECT_TRUE(ops.has_value()) << peer << " is neither mapped, nor listed, nor in ATen";
      for (const std::string& op : ops.value_or(Names{}))
        EXPECT_EQ(action_in(policy, op), std::nullopt) << peer << ", which is " << op;
    }
  }
}

// AutoMixedPrecisionLists(custom_white, custom_black) is a chain of lower() and keep_fp32() here.
TEST(PeerLists, OurEditsGiveTheMembershipThatPaddlesCustomListsGive) {
  const json data = conformance("cast_lists.json");
  std::size_t compared = 0;
  const auto known = [](const json& peers) {
    Names ops;
    for (const json& peer : peers) {
      // Paddle also accepts names that are not operators, such as my_op.
      for (const auto& op : counterparts(paddle_counterparts(), peer).value_or(Names{}))
        ops.push_back(op);
    }
    return ops;
  };
  for (const json& one : data.at("paddle_custom_lists")) {
    if (one.contains("error")) continue;  // an overlap: here the later edit counts
    SCOPED_TRACE(one.dump());
    auto policy = CastPolicy::paddle(
        {torch::kCPU, one.at("dtype") == "float16" ? torch::kHalf : torch::kBFloat16});
    for (const std::string& op : known(one.at("custom_white"))) policy.lower(op);
    for (const std::string& op : known(one.at("custom_black"))) policy.keep_fp32(op);
    const auto expect = [&](const char* list, CastAction action, bool member) {
      for (const std::string& op : known(one.at(list))) {
        EXPECT_EQ(action_in(policy, op) == action, member) << list << ": " << op;
        ++compared;
      }
    };
    expect("white_added", CastAction::lower, true);
    expect("white_removed", CastAction::lower, false);
    expect("black_added", CastAction::fp32, true);
    expect("black_removed", CastAction::fp32, false);
  }
  EXPECT_GT(compared, 0U);
}

}  // namespace
}  // namespace semitone::test
