// What is said about a model on a GPU, which need not exist.

#include "src/amp/advice.h"

#include "semitone/amp/initialize.h"
#include "semitone/core/keep_fp32.h"
#include "semitone/nn/fused_dense.h"
#include "src/amp/initialize_policy.h"
#include "src/amp/memory_format.h"
#include "src/core/libtorch_release.h"
#include "tests/support/captured_log.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace semitone::amp::advice_test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

// A GPU whose settings leave nothing to say.
DeviceFacts gpu(int compute_capability) {
  return {torch::kCUDA, compute_capability, /*tf32_products=*/true, /*cudnn_benchmark=*/true};
}

Properties of(const Options& options) {
  return Properties::resolve(options, torch::kCUDA);
}

std::vector<std::string> names(const std::vector<Advice>& all) {
  std::vector<std::string> result;
  for (const Advice& one : all) result.push_back(one.name);
  return result;
}

std::string text(const std::vector<Advice>& all, const std::string& name) {
  const auto found =
      std::find_if(all.begin(), all.end(), [&](const Advice& one) { return one.name == name; });
  return found == all.end() ? "" : found->text;
}

torch::nn::Conv2d conv(int in, int out, int groups = 1) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, 3).groups(groups));
}

std::string sizes(const Model& model, const Options& options = "O1") {
  return text(advice({model}, of(options), gpu(90)), "multiple_of_8");
}

TEST(AdviceForAGpu, IsEmptyWhereNothingIsToBeGained) {
  torch::nn::Sequential model(conv(3, 64), torch::nn::Linear(64, 10),
                              torch::nn::Linear(1024, 1024));
  for (const char* level : {"O1", "O2", "O3"}) {
    const auto options = Options(level).memory_format(at::MemoryFormat::ChannelsLast);
    EXPECT_THAT(advice({model}, of(options), gpu(90)), IsEmpty());
  }
  EXPECT_THAT(advice({model}, of("O0"), gpu(90)), IsEmpty());
}

TEST(AdviceForAGpu, IsForGpusOnly) {
  torch::nn::Sequential model(conv(5, 7));
  EXPECT_THAT(advice({model}, of("O1"), {torch::kCUDA, 90}), Not(IsEmpty()));
  EXPECT_THAT(advice({model}, of("O1"), {torch::kCUDA, 0}), IsEmpty());
  EXPECT_THAT(advice({model}, of("O1"), {torch::kXPU, 90}), IsEmpty());
  EXPECT_THAT(advice(model, Properties::resolve("O1", torch::kCPU)), IsEmpty());
  EXPECT_THAT(advice({model}, of(Options("O1").enabled(false)), {torch::kCUDA, 90}), IsEmpty());
}

TEST(AdviceForAGpu, TellsWhatOldGpusLack) {
  torch::nn::Linear model(8, 8);
  const auto fp16 = of(Options("O2").dtype(torch::kHalf));
  const auto bf16 = of(Options("O2").dtype(torch::kBFloat16));
  EXPECT_THAT(advice({model}, fp16, gpu(70)), IsEmpty());
  EXPECT_THAT(advice({model}, bf16, gpu(80)), IsEmpty());
  EXPECT_THAT(names(advice({model}, bf16, gpu(75))), ElementsAre("bf16"));
  EXPECT_THAT(text(advice({model}, bf16, gpu(75)), "bf16"),
              AllOf(HasSubstr("7.5"), HasSubstr("dtype(torch::kHalf)")));
  EXPECT_THAT(text(advice({model}, fp16, gpu(60)), "tensor_cores"),
              AllOf(HasSubstr("6.0"), HasSubstr("gain little over float32"), HasSubstr("O0")));
  EXPECT_THAT(text(advice({model}, fp16, gpu(61)), "tensor_cores"),
              HasSubstr("float16 are slower than in float32"));
  EXPECT_THAT(text(advice({model}, bf16, gpu(60)), "tensor_cores"),
              HasSubstr("bfloat16 are slower than in float32"));
  EXPECT_THAT(advice({model}, of("O0"), gpu(61)), IsEmpty());
  // Channels and sizes do not matter there.
  EXPECT_THAT(names(advice({conv(5, 7)}, fp16, gpu(61))), ElementsAre("tensor_cores"));
}

TEST(AdviceForAGpu, NamesConvolutionsThatAreNotChannelsLast) {
  torch::nn::Sequential model(conv(3, 8), conv(8, 8), conv(8, 8), conv(8, 8), conv(8, 8));
  const auto said = [&](const Options& options) {
    return text(advice({model}, of(options), gpu(80)), "memory_format");
  };
  EXPECT_THAT(said("O1"), AllOf(HasSubstr("5 2-d convolutions ('0', '1', '2' and 2 more)"),
                                HasSubstr("Options::choose_memory_format()")));
  EXPECT_EQ(said("O0"), "");
  // The program chose a format, or lets initialize choose.
  EXPECT_EQ(said(Options("O1").memory_format(at::MemoryFormat::Contiguous)), "");
  EXPECT_EQ(said(Options("O1").choose_memory_format()), "");
  EXPECT_THAT(said(Options("O2").policy(CastPolicy::semitone().keep_fp32_params("0.*"))),
              HasSubstr("4 2-d convolutions ('1', "));
  lay_out(conv2d_weights(model), at::MemoryFormat::ChannelsLast);
  EXPECT_EQ(said("O1"), "");
}

TEST(AdviceForAGpu, NamesSizesThatAreNoMultipleOf8) {
  EXPECT_THAT(sizes(torch::nn::Linear(64, 50257)),
              AllOf(HasSubstr("'the model' out_features 50257."),
                    HasSubstr("NVIDIA, Train With Mixed Precision")));
  EXPECT_EQ(sizes(torch::nn::Linear(100, 10)), "");  // too small to matter
  EXPECT_EQ(sizes(conv(3, 64)), "");                 // an image
  EXPECT_EQ(sizes(conv(64, 64, 64)), "");            // a channel for each group
  EXPECT_THAT(sizes(conv(24, 48, 2)), HasSubstr("'the model' in_channels 12. "));
  EXPECT_THAT(sizes(torch::nn::Sequential(
                  torch::nn::ConvTranspose1d(torch::nn::ConvTranspose1dOptions(8, 12, 3)),
                  torch::nn::Conv3d(torch::nn::Conv3dOptions(20, 16, 3)))),
              HasSubstr("'0' out_channels 12, '1' in_channels 20. "));
  EXPECT_THAT(sizes(torch::nn::Embedding(50257, 64)), HasSubstr("num_embeddings 50257"));
  EXPECT_EQ(sizes(torch::nn::Embedding(514, 64)), "");  // positions
  EXPECT_THAT(sizes(torch::nn::LSTM(torch::nn::LSTMOptions(256, 300))),
              HasSubstr("hidden_size 300. "));
  EXPECT_THAT(sizes(torch::nn::MultiheadAttention(torch::nn::MultiheadAttentionOptions(480, 40))),
              HasSubstr("embed_dim / num_heads 12. "));
  EXPECT_THAT(sizes(semitone::nn::FusedDense(300, 512)), HasSubstr("in_features 300. "));
}

TEST(AdviceForAGpu, GroupsNamesInOneMessage) {
  torch::nn::ModuleList inner(conv(20, 20), conv(20, 20));
  torch::nn::ModuleList model(inner, conv(20, 12));
  EXPECT_THAT(sizes(model), HasSubstr("'0.0' in_channels 20, '0.0' out_channels 20, "
                                      "'0.1' in_channels 20 and 3 more. "));
  EXPECT_EQ(sizes(model, "O0"), "");
  EXPECT_EQ(sizes(model, Options("O2").policy(CastPolicy::semitone().keep_fp32_params("*"))), "");
  EXPECT_THAT(text(advice({conv(8, 8), conv(8, 12)}, of("O3"), gpu(90)), "multiple_of_8"),
              HasSubstr("'model 1: the model' out_channels 12. "));
}

TEST(AdviceForAGpu, ReadsTorchScript) {
  torch::jit::Module head("Linear");
  head.register_parameter("weight", torch::randn({50257, 8}), /*is_buffer=*/false);
  torch::jit::Module first("Conv2d");
  first.register_parameter("weight", torch::randn({16, 12, 3, 3}), /*is_buffer=*/false);
  torch::jit::Module model("Net");
  model.register_module("head", head);
  model.register_module("first", first);
  EXPECT_THAT(sizes(model),
              AllOf(HasSubstr("'head' out_features 50257"), HasSubstr("'first' in_channels 12")));
}

TEST(AdviceForAGpu, NamesProductsInFloat32ThatCouldUseTf32) {
  torch::nn::Sequential model(torch::nn::Linear(16, 16), torch::nn::Linear(16, 8));
  const auto said = [&](const Options& options, DeviceFacts facts) {
    return text(advice({model}, of(options), facts), "tf32");
  };
  DeviceFacts ampere = gpu(80);
  ampere.tf32_products = false;
  DeviceFacts turing = gpu(75);
  turing.tf32_products = false;
  EXPECT_THAT(said("O0", ampere), AllOf(HasSubstr("2 products stay in float32 ('0', '1')"),
                                        HasSubstr("at::globalContext().setAllowTF32CuBLAS(true)")));
  EXPECT_EQ(said("O0", turing), "");
  EXPECT_EQ(said("O0", gpu(80)), "");
  EXPECT_EQ(said("O2", ampere), "");
  for (const char* level : {"O1", "O2", "O3"}) {
    EXPECT_THAT(said(Options(level).policy(CastPolicy::semitone().keep_fp32_params("1.*")), ampere),
                HasSubstr("1 products stay in float32 ('1')"));
  }
}

struct WideConvImpl : torch::nn::Conv2dImpl, KeepFp32 {
  using Conv2dImpl::Conv2dImpl;
};
TORCH_MODULE(WideConv);

TEST(AdviceForAGpu, LeavesMarkedModulesOut) {
  WideConv model(torch::nn::Conv2dOptions(20, 12, 3));
  EXPECT_EQ(sizes(model, "O2"), "");
  EXPECT_NE(sizes(model, Options("O2").keep_batchnorm_fp32(false)), "");
  EXPECT_NE(sizes(model, "O1"), "");
}

TEST(AdviceForAGpu, AsksForCudnnsBenchmarkUnlessTheProgramDecided) {
  DeviceFacts facts = gpu(90);
  facts.cudnn_benchmark = false;
  const auto said = [&](const Model& model, const Options& options) {
    return text(advice({model}, of(options), facts), "cudnn_benchmark");
  };
  EXPECT_THAT(said(conv(8, 8), "O0"), AllOf(HasSubstr("1 convolutions ('the model')"),
                                            HasSubstr("Options::cudnn_benchmark(true)")));
  EXPECT_NE(said(conv(8, 8), "O2"), "");
  EXPECT_EQ(said(torch::nn::Linear(8, 8), "O2"), "");
  EXPECT_EQ(said(conv(8, 8), Options("O2").cudnn_benchmark(false)), "");
}

TEST(AdviceInTheLog, IsWrittenOnce) {
  const test::CapturedLog log;
  log_advice({{"subject", "a text of AdviceInTheLog"}, {"subject", "another text of it"}});
  log_advice({{"subject", "a text of AdviceInTheLog"}});
  const std::string text = log.text();
  const std::size_t first = text.find("subject: a text of AdviceInTheLog");
  EXPECT_NE(first, std::string::npos);
  EXPECT_EQ(text.find("a text of AdviceInTheLog", first + 20), std::string::npos);
  EXPECT_THAT(text, HasSubstr("another text of it"));
}

TEST(AdviceInTheLog, OnACpuThereIsNone) {
  torch::nn::Sequential model(conv(5, 7), torch::nn::Linear(300, 333));
  torch::optim::SGD optimizer(model->parameters(), 0.1);
  const test::CapturedLog log;
  const auto mixed = initialize(model, optimizer, Options("O1").dtype(torch::kBFloat16));
  const std::string text = log.text();
  EXPECT_EQ(text.find("opt level O1"), text.rfind("opt level O1"));
  for (const char* name :
       {"tensor_cores:", "bf16:", "memory_format:", "multiple_of_8", "tf32:", "cudnn_benchmark:"})
    EXPECT_THAT(text, Not(HasSubstr(name)));
}

TEST(AdviceOnMemoryFormats, IsWhatInitializeChooses) {
  EXPECT_TRUE(prefers_channels_last({torch::kCPU}));
  EXPECT_TRUE(prefers_channels_last({torch::kCUDA, 70}));
  EXPECT_FALSE(prefers_channels_last({torch::kCUDA, 61}));
  EXPECT_FALSE(prefers_channels_last({torch::kCUDA, 0}));
  EXPECT_FALSE(prefers_channels_last({torch::kPrivateUse1, 90}));
  // For a GPU, with the weights of this machine.
  const std::vector<at::Tensor> weights{torch::randn({4, 3, 2, 2})};
  for (const auto& policy : {CastPolicy::semitone({torch::kCUDA, torch::kHalf}),
                             CastPolicy::none({torch::kCUDA, torch::kHalf})}) {
    EXPECT_EQ(choose_memory_format(weights, {}, OptLevel::O2, policy),
              at::MemoryFormat::ChannelsLast);
    EXPECT_EQ(choose_memory_format(weights, {}, OptLevel::O0, policy), at::MemoryFormat::Preserve);
    EXPECT_EQ(
        choose_memory_format(weights, {}, OptLevel::O2, CastPolicy(policy).fast_kernels(false)),
        at::MemoryFormat::Preserve);
  }
  EXPECT_EQ(choose_memory_format(weights, {}, OptLevel::O2, std::nullopt),
            at::MemoryFormat::Preserve);
}

// At O2 on a GPU forward needs no region of its own, except for views of channels-last tensors.
TEST(AdviceOnMemoryFormats, ForwardCanViewWhatInitializeLaidOut) {
  auto properties = of("O2");
  const std::vector<Model> models{conv(8, 8)};
  const auto policy = policy_for(models, properties);
  EXPECT_FALSE(runs_in_region(properties, policy, models));
  properties.memory_format = at::MemoryFormat::ChannelsLast;
  EXPECT_TRUE(runs_in_region(properties, policy, models));
  EXPECT_FALSE(runs_in_region(properties, CastPolicy(*policy).fast_kernels(false), models));
}

TEST(DeviceFactsOf, ACpuAreNoGpus) {
  const DeviceFacts facts = device_facts(torch::kCPU);
  EXPECT_EQ(facts.type, torch::kCPU);
  EXPECT_EQ(facts.compute_capability, 0);
}

void compute_products_in_tf32(at::Context& context) {
#if SEMITONE_LIBTORCH_SINCE(2, 10)
  context.setFloat32Precision(at::Float32Backend::CUDA, at::Float32Op::MATMUL,
                              at::Float32Precision::TF32);
#else
  context.setFloat32Precision("cuda", "matmul", "tf32");
#endif
}

TEST(DeviceFactsOf, AGpuFollowLibTorchsSettings) {
  const auto is_tf32 = [] { return device_facts(torch::kCUDA).tf32_products; };
  at::Context& context = at::globalContext();
  const bool before = is_tf32();
  context.setAllowTF32CuBLAS(true);
  EXPECT_TRUE(is_tf32());
  context.setAllowTF32CuBLAS(false);
  EXPECT_FALSE(is_tf32());
  compute_products_in_tf32(context);
  EXPECT_TRUE(is_tf32());
  context.setAllowTF32CuBLAS(before);
  const bool benchmark = context.benchmarkCuDNN();
  context.setBenchmarkCuDNN(true);
  EXPECT_TRUE(device_facts(torch::kCUDA).cudnn_benchmark);
  context.setBenchmarkCuDNN(benchmark);
}

}  // namespace
}  // namespace semitone::amp::advice_test
