// DistributedDataParallel: which models it takes, what their forward may return, and the errors for
// models that differ between ranks.

#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "src/core/libtorch_release.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"
#include "tests/support/tensors.h"

#include <torch/torch.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace semitone::parallel::ddp_models_test {
namespace {

using test::Batch;
using test::batch_of;
using test::expect_error;
using test::expect_near;
using test::gradients_of;
using test::kSumTolerance;
using test::Net;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;
using ::testing::AllOf;
using ::testing::HasSubstr;

struct OpaqueImpl : torch::nn::Module {
  OpaqueImpl() : linear(register_module("linear", torch::nn::Linear(6, 3))) { to(torch::kDouble); }
  class Result {
   public:
    explicit Result(at::Tensor result) : value(std::move(result)) {}
    at::Tensor value;

   private:
    std::string name_ = "hides its fields";
  };
  Result forward(const at::Tensor& x) { return Result(linear->forward(x)); }
  torch::nn::Linear linear;
};
TORCH_MODULE(Opaque);

// Keeps its result, and returns nothing.
struct SilentImpl : torch::nn::Module {
  SilentImpl() : linear(register_module("linear", torch::nn::Linear(6, 3))) { to(torch::kDouble); }
  void forward(const at::Tensor& x) { result = linear->forward(x); }
  torch::nn::Linear linear;
  at::Tensor result;
};
TORCH_MODULE(Silent);

// Two results, of which a step uses one.
struct BothHeads : torch::nn::Module {
  BothHeads() {
    left = register_module("left", torch::nn::Linear(6, 3));
    right = register_module("right", torch::nn::Linear(6, 3));
    to(torch::kDouble);
  }
  struct Result {
    at::Tensor left;
    at::Tensor right;
  };
  Result forward(const at::Tensor& x) { return {left(x), right(x)}; }
  torch::nn::Linear left{nullptr}, right{nullptr};
};

TEST(Results, InStructsAreSearched) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    torch::manual_seed(1);
    const auto model = std::make_shared<BothHeads>();
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    const Batch batch = batch_of(1, 2);
    for (int step = 0; step < 3; ++step) {
      const auto result = ddp.forward(batch.data);
      sum_of_squares(step == 1 ? result.right : result.left, batch.target).backward();
    }
    EXPECT_TRUE(model->left->weight.grad().defined());
    EXPECT_TRUE(model->right->weight.grad().defined());
  });
}

TEST(Results, OfAnyTypePassThrough) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    const Batch batch = batch_of(1, 2);
    Opaque model = seeded<Opaque>(1);
    {
      DistributedDataParallel ddp(model, group);
      sum_of_squares(ddp.forward(batch.data).value, batch.target).backward();
    }
    // It cannot be searched.
    DistributedDataParallel searching(
        model, group, DistributedDataParallelOptions().find_unused_parameters(true));
    expect_error([&] { searching.forward(batch.data); }, {"[parallel.ddp]", "map_tensors"});
  });
}

// A search from no results would find every parameter unused.
TEST(Results, ThatForwardDoesNotReturnCannotBeSearched) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const Batch batch = batch_of(1, 4);
    const Batch rows = batch.rows(2 * rank.number(), 2 * rank.number() + 2);
    using Options = DistributedDataParallelOptions;
    {
      Silent model = seeded<Silent>(1);
      DistributedDataParallel searching(model, group, Options().find_unused_parameters(true));
      expect_error([&] { searching.forward(rows.data); },
                   {"[parallel.ddp]", "a forward that returns tensors", "void",
                    "static_graph(true) or delay_allreduce(true)"});
      const auto local = searching.no_sync();
      searching.forward(rows.data);
      const torch::NoGradGuard no_grad;
      searching.forward(rows.data);
    }
    Silent alone = seeded<Silent>(1);
    alone->forward(batch.data);
    (sum_of_squares(alone->result, batch.target) / 2).backward();
    for (const Options& options : {Options(), Options().static_graph(true),
                                   Options().static_graph(true).find_unused_parameters(true),
                                   Options().delay_allreduce(true)}) {
      Silent model = seeded<Silent>(1);
      DistributedDataParallel ddp(model, group, options);
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        ddp.forward(rows.data);
        sum_of_squares(model->result, rows.target).backward();
        expect_near(gradients_of(model->parameters()), gradients_of(alone->parameters()));
      }
    }
  });
}

// As in LibTorch's own examples: struct Net : torch::nn::Module, and an object of it.
TEST(Models, ThatAreObjectsAreTakenByReference) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::manual_seed(1);
    BothHeads alone;
    const Batch whole = batch_of(1, 4);
    sum_of_squares(alone.forward(whole.data).left, whole.target).div(2).backward();
    torch::manual_seed(1 + static_cast<std::uint64_t>(rank.number()));
    BothHeads model;
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    EXPECT_EQ(&ddp.module(), &model);
    const auto mine = torch::arange(2) + 2 * rank.number();
    sum_of_squares(ddp.forward(whole.data.index_select(0, mine)).left,
                   whole.target.index_select(0, mine))
        .backward();
    expect_near({model.left->weight.grad()}, {alone.left->weight.grad()});
  });
}

TEST(Models, ThatDifferAreNamedOnEveryRank) {
  run_ranks(4, [](Rank& rank) {
    const auto group = comm::init();
    const bool odd = rank.number() == 2;
    const auto error_of = [&](const torch::nn::Sequential& model,
                              const DistributedDataParallelOptions& options = {}) {
      return test::error_of([&] { DistributedDataParallel ddp(model, group, options); });
    };
    using torch::nn::Linear;
    using torch::nn::Sequential;
    const auto got = [](const std::string& text) {
      return AllOf(HasSubstr("[parallel.ddp]"), HasSubstr("on rank 2: " + text));
    };
    EXPECT_THAT(error_of(Sequential(Linear(2, 3), Linear(3, odd ? 5 : 4))),
                got("parameter '1.weight' is float32[5, 3], on rank 0 float32[4, 3]"));
    EXPECT_THAT(error_of(odd ? Sequential(Linear(2, 3)) : Sequential(Linear(2, 3), Linear(3, 4))),
                got("no parameter '1.weight'"));
    EXPECT_THAT(error_of(odd ? Sequential(Linear(2, 3), Linear(3, 4)) : Sequential(Linear(2, 3))),
                got("parameter '1.weight', which rank 0 does not have"));
    Sequential half(Linear(2, 3));
    if (odd) half->to(torch::kHalf);
    EXPECT_THAT(error_of(half), got("parameter '0.weight' is float16[3, 2]"));
    Sequential frozen(Linear(2, 3), Linear(3, 3));
    if (odd) frozen->parameters()[0].requires_grad_(false);
    EXPECT_THAT(error_of(frozen), got("parameter '0.weight' is float32[3, 2] without gradient"));
    Sequential all_frozen(Linear(2, 3));
    if (odd) {
      for (const at::Tensor& parameter : all_frozen->parameters())
        parameter.set_requires_grad(false);
    }
    EXPECT_THAT(error_of(all_frozen), got("no parameter that needs a gradient"));
    EXPECT_THAT(error_of(Sequential(Linear(2, 3)),
                         DistributedDataParallelOptions().bucket_cap_mb(odd ? 5 : 25)),
                got("the option bucket_cap_mb is 5, on rank 0 25"));
    // The group is still usable.
    Sequential good(Linear(2, 3));
    DistributedDataParallel ddp(good, group);
    ddp.forward(torch::ones({1, 2})).sum().backward();
  });
}

// As the errors of comm do.
TEST(Models, OfASubgroupThatDifferAreNamedByTheRanksOfAll) {
  run_ranks(4, [](Rank& rank) {
    const comm::Group all = comm::init();
    const comm::Group pair = all.split(2);
    torch::nn::Linear model(3, rank.number() == 3 ? 5 : 4);
    if (rank.number() < 2) {
      DistributedDataParallel ddp(model, pair);
      return;
    }
    expect_error([&] { DistributedDataParallel ddp(model, pair); },
                 {"got on rank 3: parameter 'weight' is float32[5, 3], on rank 2 float32[4, 3]"});
  });
}

// Such as pretrained vectors: no gradient of theirs is sent.
TEST(Models, MayHaveAFrozenSparseTableWithEveryOption) {
  struct Words : torch::nn::Module {
    at::Tensor forward(const at::Tensor& ids) { return head(table(ids)); }
    torch::nn::Embedding table = register_module(
        "table", torch::nn::Embedding(torch::nn::EmbeddingOptions(4, 2).sparse(true)));
    torch::nn::Linear head = register_module("head", torch::nn::Linear(2, 1));
  };
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    using Options = DistributedDataParallelOptions;
    for (const Options& options :
         {Options().delay_allreduce(true), Options().compress(torch::kHalf),
          Options().gradient_predivide_factor(2)}) {
      Words model;
      model.table->weight.requires_grad_(false);
      DistributedDataParallel ddp(model, group, options);
      ddp.forward(torch::arange(4)).sum().backward();
      EXPECT_TRUE(model.head->weight.grad().defined());
      model.table->weight.requires_grad_(true);
      expect_error([&] { DistributedDataParallel again(model, group, options); },
                   {"'table.weight' with a sparse gradient"});
    }
  });
}

// Before the first backward pass, which would fail in the transport.
TEST(Models, WithGradientsThatTheBackendCannotAddUpAreNamed) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init("env://", comm::InitOptions().backend("gloo"));
    torch::nn::Sequential model(torch::nn::Linear(2, 3));
    const at::Tensor scale = model->register_parameter(
        "scale", torch::ones({3}).to(torch::kFloat8_e4m3fn), /*requires_grad=*/true);
    expect_error([&] { DistributedDataParallel<torch::nn::Sequential> ddp(model, group); },
                 {"[parallel.ddp]", "on rank 0: 'scale' of float8_e4m3fn", "on rank 1: 'scale'",
                  "the backend gloo cannot add up", "fp32"});
    // Frozen parameters are only sent.
    scale.set_requires_grad(false);
    DistributedDataParallel<torch::nn::Sequential> ddp(model, group);
  });
}

// Such as the adjacency matrix of a graph: broadcast() takes dense tensors only.
TEST(Models, WithASparseBufferAreRefusedByItsNameInSeveralProcesses) {
  run_ranks(2, [](Rank&) {
    torch::nn::Linear model(2, 3);
    model->register_buffer("edges", torch::eye(3).to_sparse());
    const DistributedDataParallel<torch::nn::Linear> alone(model, comm::Group());
    const auto group = comm::init();
    expect_error([&] { DistributedDataParallel<torch::nn::Linear> ddp(model, group); },
                 {"[parallel.ddp]", "'edges' that is not dense"});
  });
}

#if SEMITONE_LIBTORCH_SINCE(2, 11)
struct RotationImpl : torch::nn::Module {
  RotationImpl() {
    linear = register_module("linear", torch::nn::Linear(6, 3));
    linear->to(torch::kDouble);
    phases = register_parameter(
        "phases", torch::polar(torch::ones({3}, torch::kDouble), torch::ones({3}, torch::kDouble)));
  }
  at::Tensor forward(const at::Tensor& x) {
    return torch::real(linear->forward(x) * phases * phases);
  }
  torch::nn::Linear linear{nullptr};
  at::Tensor phases;
};
TORCH_MODULE(Rotation);

TEST(Models, WithComplexParametersTrainAsOneProcess) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    using Options = DistributedDataParallelOptions;
    const auto gradients = [](const Rotation& model) {
      return std::vector<at::Tensor>{model->linear->weight.grad(), model->linear->bias.grad(),
                                     torch::view_as_real(model->phases.grad().resolve_conj())};
    };
    const Batch batch = batch_of(1, 8);
    const Batch rows = batch.rows(4 * rank.number(), 4 * rank.number() + 4);
    Rotation alone = seeded<Rotation>(1);
    (sum_of_squares(alone->forward(batch.data), batch.target) / 2).backward();
    for (const Options& options :
         {Options(), Options().find_unused_parameters(true), Options().static_graph(true),
          Options().delay_allreduce(true), Options().gradient_predivide_factor(1.5)}) {
      Rotation model = seeded<Rotation>(1);
      DistributedDataParallel ddp(model, group, options);
      for (int step = 0; step < 3; ++step) {
        model->zero_grad();
        sum_of_squares(ddp.forward(rows.data), rows.target).backward();
        expect_near(gradients(model), gradients(alone));
      }
    }
  });
}

TEST(Models, WithComplexParametersFollowInJoin) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Rotation model = seeded<Rotation>(1);
    DistributedDataParallel ddp(model, group);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9));
    const std::vector<at::Tensor> before = test::copies(model->parameters());
    JoinOptions options;
    options.follow([&](const auto& receive) {
      model->zero_grad();
      receive();
      optimizer.step();
    });
    ddp.join(
        [&] {
          for (int step = 0; step < (rank.number() == 0 ? 3 : 1); ++step) {
            model->zero_grad();
            const Batch batch = batch_of(10 * rank.number() + step, 4);
            sum_of_squares(ddp.forward(batch.data), batch.target).backward();
            optimizer.step();
          }
        },
        options);
    for (std::size_t i = 0; i < before.size(); ++i)
      EXPECT_FALSE(torch::equal(model->parameters()[i], before[i])) << i;
    test::expect_equal_on_all_ranks(
        group, {model->linear->weight, model->linear->bias, torch::view_as_real(model->phases)});
  });
}
#endif

TEST(Models, ThatLieInMemoryInOtherWaysAreNamed) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    torch::nn::Sequential model(torch::nn::Conv2d(3, 4, 3), torch::nn::BatchNorm2d(4));
    if (rank.number() == 1) {
      for (at::Tensor& parameter : model->parameters()) {
        if (parameter.dim() == 4)
          parameter.set_data(parameter.detach().contiguous(at::MemoryFormat::ChannelsLast));
      }
    }
    expect_error([&] { DistributedDataParallel<torch::nn::Sequential> ddp(model, group); },
                 {"on rank 1", "'0.weight' is float32[4, 3, 3, 3] with strides [27, 1, 9, 3]",
                  "on rank 0 float32[4, 3, 3, 3]"});
    // But not strides of dimensions of extent 1, which have no meaning.
    torch::nn::Sequential other(torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, {1, 2})));
    const at::Tensor weight = other->parameters()[0];
    const std::int64_t any = rank.number() == 1 ? 6 : 77;
    other->parameters()[0].set_data(
        at::empty({6 * 77}).as_strided({4, 3, 1, 2}, {6, 1, any, 3}).copy_(weight));
    DistributedDataParallel<torch::nn::Sequential> ddp(other, group);
  });
}

TEST(Models, ThatAreCastAfterwardsAreNamed) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Net model = seeded<Net>(1);
    DistributedDataParallel ddp(model, group);
    model->to(torch::kFloat);
    expect_error([&] { ddp.forward(torch::ones({1, 6})); },
                 {"'first.weight'", "float64", "float32", "cast and move the model first"});
  });
}

TEST(Models, WithTiedSparseAndFrozenParametersTrainAsOneProcess) {
  struct TiedImpl : torch::nn::Module {
    TiedImpl() {
      sparse = register_module(
          "sparse", torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 4).sparse(true)));
      table = register_module("table", torch::nn::Embedding(7, 4));
      register_parameter("tied", table->weight);
      frozen = register_parameter("frozen", torch::ones({4}), false);
      to(torch::kDouble);
    }
    at::Tensor forward(const at::Tensor& words) {
      return torch::linear(table->forward(words) * frozen + sparse->forward(words % 5),
                           table->weight);
    }
    torch::nn::Embedding sparse{nullptr}, table{nullptr};
    at::Tensor frozen;
  };
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const at::Tensor words = torch::arange(8) % 7;
    const auto loss = [](const at::Tensor& output) { return output.pow(2).sum() / 8; };
    torch::manual_seed(1);
    const auto alone = std::make_shared<TiedImpl>();
    torch::manual_seed(1);
    const auto model = std::make_shared<TiedImpl>();
    DistributedDataParallel ddp(model, group);
    for (int step = 0; step < 4; ++step) {
      alone->zero_grad();
      model->zero_grad();
      loss(alone->forward(words)).backward();
      (loss(ddp.forward(words.slice(0, 4 * rank.number(), 4 * rank.number() + 4))) * 2).backward();
      EXPECT_TRUE(model->sparse->weight.grad().is_sparse());
      EXPECT_TRUE(test::near(model->sparse->weight.grad().to_dense(),
                             alone->sparse->weight.grad().to_dense(), kSumTolerance));
      EXPECT_TRUE(
          test::near(model->table->weight.grad(), alone->table->weight.grad(), kSumTolerance));
      EXPECT_FALSE(model->frozen.grad().defined());
    }
  });
}

}  // namespace
}  // namespace semitone::parallel::ddp_models_test
