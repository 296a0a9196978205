#include "semitone/autocast/cast_policy.h"

#include "semitone/core/device.h"
#include "src/autocast/op_names.h"
#include "src/autocast/presets/presets.h"
#include "src/core/libtorch_release.h"
#include "tests/support/errors.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <thread>
#include <vector>

// Another library's operators, with an in-place and an out= form.
TORCH_LIBRARY(semitone_policy_test, library) {
  library.def("twice(Tensor x) -> Tensor");
  library.def("twice.scaled(Tensor x, float by) -> Tensor");
  library.def("twice.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)");
  library.def("halve_(Tensor(a!) x) -> Tensor(a!)");
}

namespace semitone::amp::cast_policy_test {
namespace {

using test::error_of;
using test::expect_error;

std::optional<CastAction> action_of(const CastPolicy& policy, std::string_view op) {
  const auto row = policy.find(op);
  return row.has_value() ? std::optional(row->action) : std::nullopt;
}

// ---- presets -----------------------------------------------------------------------------------

const std::vector<std::string> kPresets = CastPolicy::preset_names();

TEST(CastPolicyPresets, ExistForEveryDeviceAndBothDtypes) {
  for (const std::string& name : kPresets) {
    for (const auto device : {torch::kCPU, torch::kCUDA, torch::kXPU, torch::kMPS}) {
      for (const auto dtype : {torch::kHalf, torch::kBFloat16}) {
        SCOPED_TRACE(name + " on " + c10::DeviceTypeName(device));
        const auto policy = CastPolicy::by_name(name, {device, dtype});
        EXPECT_EQ(policy.name(), name);
        EXPECT_EQ(policy.device(), device);
        EXPECT_EQ(policy.dtype(), dtype);
        EXPECT_EQ(policy.emulation(), Emulation::automatic);
        EXPECT_EQ(policy.rows().empty(), name == "none");
        for (const auto& [op, row] : policy.rows()) EXPECT_FALSE(row.reason.empty()) << op;
      }
    }
  }
}

TEST(CastPolicyPresets, TakeTheDevicesOwnDtypeAndTheMachinesOwnDevice) {
  EXPECT_EQ(CastPolicy::semitone(torch::kCPU).dtype(), torch::kBFloat16);
  EXPECT_EQ(CastPolicy::semitone(torch::kCUDA).dtype(), torch::kHalf);
  EXPECT_EQ(CastPolicy::semitone(torch::kHalf).device(), default_device());
  EXPECT_EQ(CastPolicy::semitone(torch::kHalf).dtype(), torch::kHalf);
  EXPECT_EQ(CastPolicy::semitone().device(), default_device());
  EXPECT_EQ(CastPolicy::semitone().dtype(), default_16bit_dtype(default_device()));
}

TEST(CastPolicyPresets, PaddleHasTwoLevels) {
  EXPECT_EQ(CastPolicy::paddle(torch::kCPU).name(), "paddle");
  EXPECT_EQ(CastPolicy::paddle(torch::kCPU, PaddleLevel::O2).name(), "paddle-o2");
  EXPECT_EQ(action_of(CastPolicy::paddle(torch::kCPU), "exp"), CastAction::fp32);
  EXPECT_EQ(action_of(CastPolicy::paddle(torch::kCPU, PaddleLevel::O2), "exp"), std::nullopt);
}

// On a GPU semitone is LibTorch's list. On a CPU it casts the same operators, except for the
// normalisation layers, which keep their statistics in fp32 anyway.
TEST(CastPolicyPresets, SemitoneOnACpuCoversWhatTorchListsOnAGpu) {
  const auto cpu = CastPolicy::semitone(torch::kCPU);
  EXPECT_EQ(CastPolicy::semitone(torch::kCUDA).rows().size(),
            CastPolicy::torch(torch::kCUDA).rows().size());
  for (const auto& [op, row] : CastPolicy::torch(torch::kCUDA).rows()) {
    if (op.rfind("cudnn", 0) == 0 || op.rfind("_cudnn", 0) == 0) continue;
    ASSERT_TRUE(cpu.find(op).has_value()) << op;
    const auto action = cpu.find(op)->action;
    if (action == CastAction::leave) {
      EXPECT_NE(op.find("norm"), std::string::npos) << op;
    } else if (row.action != CastAction::ban && op != "grid_sampler") {
      EXPECT_EQ(action, row.action) << op;
    }
  }
}

// Names of presets that some versions of LibTorch lack. All others must exist.
const std::set<std::string>& version_dependent() {
  static const std::set<std::string> names{
#if !SEMITONE_LIBTORCH_SINCE(2, 15)
      "linalg_matrix_sqrth",
#else
      "cholesky",
      "cumprod.dimname",
      "cumsum.dimname",
      "index_copy.dimname",
      "log_softmax.Dimname",
      "norm.names_ScalarOpt_dim",
      "prod.dim_Dimname",
      "qr",
      "softmax.Dimname",
      "sum.dim_DimnameList",
#endif
  };
  return names;
}

TEST(CastPolicyPresets, EveryNameInATableIsAnOperator) {
  std::set<std::string> bases;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const std::string full = display_name(name);
    bases.insert(full.substr(0, full.find('.')));
  }
  for (const presets::Preset& preset : presets::all()) {
    for (const auto device : {torch::kCPU, torch::kCUDA}) {
      SCOPED_TRACE(std::string(preset.name) + " on " + c10::DeviceTypeName(device));
      const presets::Table table = preset.table(device);
      std::set<std::string_view> seen;
      for (const presets::Rows& rows : table.rows) {
        for (const std::string_view op : rows.ops) {
          EXPECT_TRUE(seen.insert(op).second) << op << " stands twice";
          const bool exists =
              table.is_exact ? find_operator(op).has_value() : bases.count(std::string(op)) == 1;
          EXPECT_NE(exists, version_dependent().count(std::string(op)) == 1) << op;
        }
      }
    }
  }
}

TEST(CastPolicyPresets, ByNameProposesTheNamesThatExist) {
  std::string names = kPresets.front();
  for (std::size_t i = 1; i < kPresets.size(); ++i)
    names += (i + 1 < kPresets.size() ? ", " : " or ") + kPresets[i];
  expect_error([] { (void)CastPolicy::by_name("pytorch", torch::kCPU); },
               {"[amp.cast_policy]", names, "'pytorch'"});
}

TEST(CastPolicyPresets, CanBeMadeByManyThreadsAtOnce) {
  std::vector<std::thread> threads;
  std::vector<std::size_t> rows(8);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    threads.emplace_back([&rows, i] {
      for (int repeat = 0; repeat < 20; ++repeat) {
        auto policy = CastPolicy::by_name(kPresets[i % kPresets.size()], torch::kCPU);
        policy.lower("relu").compiled();
        rows[i] = policy.rows().size();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (std::size_t i = 0; i < rows.size(); ++i)
    EXPECT_EQ(rows[i],
              CastPolicy::by_name(kPresets[i % kPresets.size()], torch::kCPU).rows().size() + 1);
}

// ---- targets -----------------------------------------------------------------------------------

TEST(CastTarget, RefusesDtypesThatAreNot16Bit) {
  for (const auto dtype :
       {torch::kFloat, torch::kDouble, torch::kInt, torch::kFloat8_e4m3fn, torch::kComplexFloat}) {
    expect_error([&] { (void)CastPolicy::semitone(dtype); },
                 {"[amp.cast_policy]", "float16 or bfloat16"});
    expect_error([&] { (void)CastTarget(torch::kCPU, dtype); }, {"[amp.cast_policy]"});
  }
}

TEST(CastTarget, RefusesDevicesWithoutAutocast) {
  for (const std::string& name : kPresets)
    expect_error([&] { (void)CastPolicy::by_name(name, torch::kMeta); }, {"device type", "meta"});
}

TEST(CastPolicyTargets, WithTargetTakesThePresetsRowsOfTheDevice) {
  auto policy = CastPolicy::torch({torch::kCPU, torch::kBFloat16}).lower("relu", "why not");
  const auto moved = policy.with_target({torch::kCUDA, torch::kHalf});
  EXPECT_EQ(moved.device(), torch::kCUDA);
  EXPECT_EQ(moved.dtype(), torch::kHalf);
  EXPECT_EQ(moved.name(), "torch");
  EXPECT_EQ(moved.find("relu")->reason, "why not");
  for (const std::string& name : kPresets) {
    SCOPED_TRACE(name);
    for (const auto from : {torch::kCPU, torch::kCUDA}) {
      const auto to = from == torch::kCPU ? torch::kCUDA : torch::kCPU;
      auto edited = CastPolicy::by_name(name, {from, torch::kHalf}).keep_fp32("relu");
      (void)edited.compiled();
      const auto again = edited.with_target({to, torch::kBFloat16});
      const auto want = CastPolicy::by_name(name, {to, torch::kBFloat16}).keep_fp32("relu");
      ASSERT_EQ(again.rows().size(), want.rows().size());
      for (const auto& [op, row] : want.rows()) {
        ASSERT_TRUE(again.find(op).has_value()) << op;
        EXPECT_EQ(again.find(op)->action, row.action) << op;
      }
      EXPECT_EQ(again.emulation(), edited.emulation());
      EXPECT_EQ(again.fast_kernels(), edited.fast_kernels());
    }
  }
  EXPECT_EQ(policy.device(), torch::kCPU);
}

// ---- edits -------------------------------------------------------------------------------------

TEST(CastPolicyEdits, SetTheActionAndTheReason) {
  auto policy = CastPolicy::none(torch::kCPU);
  policy.lower("relu").keep_fp32("tanh").promote("add").widest("sub").leave("mm").ban("erf");
  EXPECT_EQ(action_of(policy, "relu"), CastAction::lower);
  EXPECT_EQ(action_of(policy, "tanh"), CastAction::fp32);
  EXPECT_EQ(action_of(policy, "add.Tensor"), CastAction::promote);
  EXPECT_EQ(action_of(policy, "sub.Tensor"), CastAction::widest);
  EXPECT_EQ(action_of(policy, "mm"), CastAction::leave);
  EXPECT_EQ(action_of(policy, "erf"), CastAction::ban);
  EXPECT_EQ(policy.find("relu")->reason, "set by the user");
  policy.set("relu", CastAction::ban, "for the test");
  EXPECT_EQ(action_of(policy, "relu"), CastAction::ban);
  EXPECT_EQ(policy.find("relu")->reason, "for the test");
}

TEST(CastPolicyEdits, ANameWithoutOverloadMeansAllThatDoNotWrite) {
  auto policy = CastPolicy::none(torch::kCPU).lower("add");
  for (const auto& [op, row] : policy.rows()) {
    EXPECT_EQ(op.rfind("add.", 0), 0U) << op;
    EXPECT_FALSE(writes_to_argument(*find_operator(op))) << op;
  }
  EXPECT_TRUE(policy.find("add.Tensor").has_value());
  EXPECT_TRUE(policy.find("add.Scalar").has_value());
  EXPECT_FALSE(policy.find("add.out").has_value());
  EXPECT_FALSE(policy.find("add").has_value()) << "add has no overload without a name";
}

TEST(CastPolicyEdits, AnOverloadMeansItself) {
  auto policy = CastPolicy::none(torch::kCPU).lower("conv2d.padding");
  EXPECT_EQ(policy.rows().size(), 1U);
  EXPECT_TRUE(policy.find("conv2d.padding").has_value());
  EXPECT_FALSE(policy.find("conv2d").has_value());
  policy.lower("conv2d");
  EXPECT_TRUE(policy.find("conv2d").has_value());
}

TEST(CastPolicyEdits, TakeFullyQualifiedNamesToo) {
  auto policy = CastPolicy::none(torch::kCPU).lower("aten::conv2d");
  EXPECT_TRUE(policy.find("conv2d.padding").has_value());
  EXPECT_TRUE(policy.find("aten::conv2d.padding").has_value());
}

TEST(CastPolicyEdits, RowsAreInAlphabeticalOrder) {
  const auto policy = CastPolicy::semitone(torch::kCPU);
  EXPECT_TRUE(std::is_sorted(policy.rows().begin(), policy.rows().end(),
                             [](const auto& a, const auto& b) { return a.first < b.first; }));
}

TEST(CastPolicyEdits, AnUnknownOperatorIsAnErrorThatProposesTheNearest) {
  auto policy = CastPolicy::semitone(torch::kCPU);
  const auto rows = policy.rows().size();
  expect_error([&] { policy.lower("sofmax"); },
               {"[amp.cast_policy]", "'sofmax'", "did you mean", "'softmax'"});
  expect_error([&] { policy.keep_fp32("conv2d.paddin"); }, {"did you mean", "'conv2d.padding'"});
  expect_error([&] { policy.ban("semitone_policy_test::twise"); },
               {"'semitone_policy_test::twice'"});
  expect_error([&] { policy.leave("no_such_operator_at_all"); }, {"ATen names as in at::conv2d"});
  expect_error([&] { policy.leave(""); }, {"''"});
  expect_error([&] { policy.leave("."); }, {"'.'"});
  expect_error([&] { policy.lower("nosuchlibrary::op"); }, {"'nosuchlibrary::op'"});
  EXPECT_EQ(policy.rows().size(), rows) << "a failed edit must change nothing";
}

TEST(CastPolicyEdits, ProposalsAreFew) {
  auto policy = CastPolicy::none(torch::kCPU);
  const std::string message = error_of([&] { policy.lower("ad"); });
  EXPECT_LE(std::count(message.begin(), message.end(), ','), 4) << message;
}

TEST(CastPolicyEdits, OperatorsOfOtherLibrariesAreCalledByTheirNamespace) {
  auto policy = CastPolicy::none(torch::kCPU).lower("semitone_policy_test::twice");
  EXPECT_TRUE(policy.find("semitone_policy_test::twice").has_value());
  EXPECT_TRUE(policy.find("semitone_policy_test::twice.scaled").has_value());
  EXPECT_FALSE(policy.find("semitone_policy_test::twice.out").has_value());
  expect_error([&] { policy.lower("twice"); }, {"'twice'"});
}

TEST(CastPolicyEdits, WhatWritesToItsArgumentCanOnlyBeBannedOrLeft) {
  auto policy = CastPolicy::none(torch::kCPU);
  for (const char* op : {"add_", "mm.out", "exp_", "semitone_policy_test::halve_",
                         "semitone_policy_test::twice.out"}) {
    SCOPED_TRACE(op);
    for (const auto action :
         {CastAction::lower, CastAction::fp32, CastAction::promote, CastAction::widest}) {
      expect_error([&] { policy.set(op, action); },
                   {"[amp.cast_policy]", "out-of-place", "name the out-of-place form"});
    }
    EXPECT_NO_THROW(policy.ban(op));
    EXPECT_NO_THROW(policy.leave(op));
  }
}

TEST(CastPolicyEdits, CopiesAreValues) {
  const auto original = CastPolicy::semitone(torch::kCPU);
  (void)original.compiled();
  auto copy = original;
  copy.leave("softmax").keep_fp32_params("head.*").emulation(Emulation::always);
  EXPECT_EQ(action_of(original, "softmax.int"), CastAction::fp32);
  EXPECT_TRUE(original.fp32_param_globs().empty());
  EXPECT_EQ(original.emulation(), Emulation::automatic);
  EXPECT_EQ(action_of(CastPolicy::semitone(torch::kCPU), "softmax.int"), CastAction::fp32)
      << "an edit must not reach the preset";
  EXPECT_EQ(action_of(copy, "softmax.int"), CastAction::leave);
  EXPECT_NE(original.compiled(), copy.compiled());
  EXPECT_EQ(original.compiled(), CastPolicy(original).compiled());
}

TEST(CastAction, HasAName) {
  EXPECT_EQ(name_of(CastAction::lower), "lower");
  EXPECT_EQ(name_of(CastAction::fp32), "fp32");
  EXPECT_EQ(name_of(CastAction::promote), "promote");
  EXPECT_EQ(name_of(CastAction::widest), "widest");
  EXPECT_EQ(name_of(CastAction::leave), "leave");
  EXPECT_EQ(name_of(CastAction::ban), "ban");
}

// ---- parameters by name ------------------------------------------------------------------------

struct NetImpl : torch::nn::Module {
  NetImpl() {
    body = register_module("body",
                           torch::nn::Sequential(torch::nn::Linear(4, 4), torch::nn::Linear(4, 4)));
    head = register_module("head", torch::nn::Linear(4, 2));
    scale = register_parameter("scale", torch::ones({1}));
    register_buffer("head_count", torch::zeros({1}));
  }
  torch::nn::Sequential body{nullptr};
  torch::nn::Linear head{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Net);

std::set<std::string> kept(const CastPolicy& policy, const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_parameters()) {
    if (policy.keeps_fp32(item.value())) names.insert(item.key());
  }
  return names;
}

TEST(CastPolicyParams, GlobsChooseParameters) {
  const Net net;
  const auto chosen = [&](std::initializer_list<const char*> globs) {
    auto policy = CastPolicy::semitone(torch::kCPU);
    for (const char* glob : globs) policy.keep_fp32_params(glob);
    return kept(policy.bind(net), *net);
  };
  using Names = std::set<std::string>;
  EXPECT_EQ(chosen({"head.*"}), (Names{"head.weight", "head.bias"}));
  EXPECT_EQ(chosen({"*.bias"}), (Names{"body.0.bias", "body.1.bias", "head.bias"}))
      << "* matches dots";
  EXPECT_EQ(chosen({"body.?.weight"}), (Names{"body.0.weight", "body.1.weight"}));
  EXPECT_EQ(chosen({"body.[1-9].*"}), (Names{"body.1.weight", "body.1.bias"}));
  EXPECT_EQ(chosen({"scale", "head.bias"}), (Names{"scale", "head.bias"}));
  EXPECT_EQ(chosen({"*"}).size(), 7U);
  EXPECT_EQ(chosen({}), Names{});
}

TEST(CastPolicyParams, AViewOfAKeptParameterIsKept) {
  const Net net;
  const auto policy = CastPolicy::semitone(torch::kCPU).keep_fp32_params("head.*").bind(net);
  EXPECT_TRUE(policy.keeps_fp32(net->head->weight.t()));
  EXPECT_FALSE(policy.keeps_fp32(net->scale.view({1, 1})));
  EXPECT_FALSE(policy.keeps_fp32(torch::ones({2})));
}

TEST(CastPolicyParams, ASharedParameterIsKeptIfOneOfItsNamesMatches) {
  struct Tied : torch::nn::Module {
    Tied() {
      const auto weight = torch::ones({2, 2});
      register_parameter("embedding", weight);
      register_parameter("output", weight);
    }
  };
  auto tied = std::make_shared<Tied>();
  for (const char* glob : {"embedding", "output"}) {
    const auto policy = CastPolicy::semitone(torch::kCPU).keep_fp32_params(glob).bind(tied);
    EXPECT_TRUE(policy.keeps_fp32(tied->named_parameters()["embedding"])) << glob;
  }
}

TEST(CastPolicyParams, AGlobThatMatchesNothingIsAnErrorInBind) {
  const Net net;
  auto policy =
      CastPolicy::semitone(torch::kCPU).keep_fp32_params("head.*").keep_fp32_params("head.wieght");
  EXPECT_EQ(policy.fp32_param_globs(), (std::vector<std::string>{"head.*", "head.wieght"}));
  expect_error([&] { (void)policy.bind(net); }, {"[amp.cast_policy.bind]", "'head.wieght'",
                                                 "7 parameters", "did you mean 'head.weight'"});
  expect_error(
      [&] { (void)CastPolicy::semitone(torch::kCPU).keep_fp32_params("head_count").bind(net); },
      {"'head_count'"});  // a buffer
  expect_error(
      [&] {
        (void)CastPolicy::semitone(torch::kCPU).keep_fp32_params("zzzzzzzzzzzzzzzz").bind(net);
      },
      {"the first is called"});
  expect_error([&] { CastPolicy::semitone(torch::kCPU).keep_fp32_params(""); }, {"empty"});
}

TEST(CastPolicyParams, BindTakesEveryKindOfModel) {
  const auto policy = CastPolicy::semitone(torch::kCPU).keep_fp32_params("*weight");
  Net net;
  EXPECT_FALSE(kept(policy.bind(net), *net).empty());
  EXPECT_FALSE(kept(policy.bind(*net), *net).empty());
  EXPECT_FALSE(kept(policy.bind(net.ptr()), *net).empty());
  EXPECT_FALSE(
      kept(policy.bind(std::static_pointer_cast<torch::nn::Module>(net.ptr())), *net).empty());

  torch::jit::Module script("Scripted");
  script.register_parameter("my_weight", torch::ones({2}), false);
  EXPECT_TRUE(policy.bind(script).keeps_fp32(script.attr("my_weight").toTensor()));
}

TEST(CastPolicyParams, BindingLeavesTheUnboundPolicyAlone) {
  const Net net;
  const auto policy = CastPolicy::semitone(torch::kCPU).keep_fp32_params("head.*");
  const auto bound = policy.bind(net);
  EXPECT_TRUE(kept(policy, *net).empty());
  EXPECT_EQ(kept(bound, *net).size(), 2U);
  EXPECT_EQ(kept(bound.with_target({torch::kCPU, torch::kHalf}), *net).size(), 2U);
}

TEST(CastPolicyParams, GlobsGivenAfterBindAreResolvedAtOnce) {
  const Net net;
  auto bound = CastPolicy::semitone(torch::kCPU).keep_fp32_params("scale").bind(net);
  const auto before = bound;
  bound.keep_fp32_params("head.*");
  EXPECT_EQ(kept(bound, *net), (std::set<std::string>{"scale", "head.weight", "head.bias"}));
  EXPECT_EQ(kept(before, *net), (std::set<std::string>{"scale"})) << "copies are values";
  expect_error([&] { bound.keep_fp32_params("head.wieght"); },
               {"'head.wieght'", "did you mean 'head.weight'"});
  EXPECT_EQ(bound.fp32_param_globs(), (std::vector<std::string>{"scale", "head.*"}));
  EXPECT_EQ(kept(bound.lower("softmax"), *net).size(), 3U);
}

TEST(CastPolicyParams, ABoundPolicyDoesNotOwnTheParameters) {
  auto weight = torch::ones({4});
  torch::jit::Module script("Scripted");
  script.register_parameter("weight", weight, false);
  const auto policy = CastPolicy::semitone(torch::kCPU).bind(script);
  (void)policy.compiled();
  const auto before = weight.use_count();
  {
    const auto copy = policy;
    EXPECT_EQ(weight.use_count(), before);
  }
  script = torch::jit::Module("Empty");
  EXPECT_EQ(weight.use_count(), 1U);
}

}  // namespace
}  // namespace semitone::amp::cast_policy_test
