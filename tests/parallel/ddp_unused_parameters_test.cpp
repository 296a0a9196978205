// DistributedDataParallel: parameters that a step does not use, and graphs that stay the same.

#include "semitone/comm/init.h"
#include "semitone/parallel/distributed_data_parallel.h"
#include "tests/parallel/ddp_fixture.h"
#include "tests/parallel/models.h"
#include "tests/support/errors.h"
#include "tests/support/run_ranks.h"

#include <torch/torch.h>

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace semitone::parallel::ddp_unused_parameters_test {
namespace {

using test::Batch;
using test::batch_of;
using test::expect_error;
using test::expect_near;
using test::Heads;
using test::Rank;
using test::run_ranks;
using test::seeded;
using test::sum_of_squares;
using test::train;

constexpr int kSteps = 20;

TEST(UnusedParameters, AreNamedInTheError) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool views : {false, true}) {
      Heads model = seeded<Heads>(1);
      DistributedDataParallel ddp(model, group,
                                  DistributedDataParallelOptions().gradient_as_bucket_view(views));
      const Batch batch = batch_of(1, 2);
      sum_of_squares(ddp.forward(batch.data, true), batch.target).backward();
      expect_error([&] { ddp.forward(batch.data, true); },
                   {"[parallel.ddp]", "'right.weight', 'right.bias', 'never.weight', 'never.bias'",
                    "rank " + std::to_string(rank.number()), "find_unused_parameters(true)"});
    }
  });
}

// The first forward of two is as one whose backward pass failed: the gradients from no_sync() stay.
TEST(UnusedParameters, OfNoSyncAreReducedAfterTwoForwards) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Heads model = seeded<Heads>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    const Batch batch = batch_of(1, 6).rows(3 * rank.number(), 3 * rank.number() + 3);
    const auto loss = [&](bool use_left) {
      return sum_of_squares(ddp.forward(batch.data, use_left), batch.target);
    };
    {
      const auto local = ddp.no_sync();
      loss(true).backward();
    }
    std::vector<at::Tensor> mean;
    for (const auto& item : model->named_parameters()) {
      if (!item.key().starts_with("left")) continue;
      const auto all = group.all_gather(item.value().grad());
      mean.push_back((all[0] + all[1]) / 2);
    }
    ASSERT_FALSE(mean.empty());
    const at::Tensor first = loss(false);
    const at::Tensor second = loss(false);
    (first + second).backward();
    std::size_t next = 0;
    for (const auto& item : model->named_parameters()) {
      if (!item.key().starts_with("left")) continue;
      EXPECT_TRUE(torch::allclose(item.value().grad(), mean.at(next++))) << item.key();
    }
  });
}

TEST(UnusedParameters, AreLeftAloneWhereNoRankUsesThem) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    const auto use_left = [](int step, int of_rank) {
      return (step + of_rank * (step % 3)) % 2 == 0;
    };
    Heads alone = seeded<Heads>(1);
    train(*alone, kSteps, [&](int step) {
      const Batch batch = batch_of(100 + step, 8);
      for (int each = 0; each < 2; ++each) {
        const Batch rows = batch.rows(4 * each, 4 * each + 4);
        (sum_of_squares(alone->forward(rows.data, use_left(step, each)), rows.target) / 8)
            .backward();
      }
    });
    const std::vector<DistributedDataParallelOptions> ways = {
        DistributedDataParallelOptions().find_unused_parameters(true),
        DistributedDataParallelOptions()
            .find_unused_parameters(true)
            .bucket_cap_mb(0.0003)
            .first_bucket_mb(0.0001),
        DistributedDataParallelOptions().delay_allreduce(true)};
    for (const DistributedDataParallelOptions& options : ways) {
      Heads model = seeded<Heads>(1);
      DistributedDataParallel ddp(model, group, options);
      train(*model, kSteps, [&](int step) {
        const Batch batch = batch_of(100 + step, 8).rows(4 * rank.number(), 4 * rank.number() + 4);
        const at::Tensor output = ddp.forward(batch.data, use_left(step, rank.number()));
        (sum_of_squares(output, batch.target) * 2 / 8).backward();
        // Used by one of two ranks: the mean counts the other as zero.
        EXPECT_EQ(model->left->bias.grad().defined(), use_left(step, 0) || use_left(step, 1));
        EXPECT_FALSE(model->never->bias.grad().defined());
      });
      expect_near(model->parameters(), alone->parameters());
    }
  });
}

TEST(UnusedParameters, AreFoundOutOnceInAStaticGraph) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Heads alone = seeded<Heads>(1);
    Heads model = seeded<Heads>(1);
    DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().static_graph(true));
    const auto batch = [](int step) { return batch_of(100 + step, 8); };
    train(*alone, 5, [&](int step) {
      (sum_of_squares(alone->forward(batch(step).data, true), batch(step).target) / 8).backward();
    });
    train(*model, 5, [&](int step) {
      const Batch rows = batch(step).rows(4 * rank.number(), 4 * rank.number() + 4);
      (sum_of_squares(ddp.forward(rows.data, true), rows.target) * 2 / 8).backward();
    });
    expect_near(model->parameters(), alone->parameters());
  });
}

TEST(StaticGraph, ThatChangesIsAnError) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Heads model = seeded<Heads>(1);
    DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().static_graph(true));
    const Batch batch = batch_of(rank.number(), 2);
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      sum_of_squares(ddp.forward(batch.data, true), batch.target).backward();
    }
    // The trunk's gradients come, the left head's do not.
    const at::Tensor output = ddp.forward(batch.data, true);
    model->trunk->forward(batch.data).sum().backward();
    expect_error([&] { ddp.forward(batch.data, true); },
                 {"[parallel.ddp]", "static_graph(true)", "fewer gradients",
                  "rank " + std::to_string(rank.number())});
  });
}

// Several results, of which a loss need not use all.
struct PairImpl : torch::nn::Module {
  PairImpl() {
    left = register_module("left", torch::nn::Linear(6, 3));
    right = register_module("right", torch::nn::Linear(6, 3));
    to(torch::kDouble);
  }
  std::pair<at::Tensor, std::vector<at::Tensor>> forward(const at::Tensor& x) {
    return {left->forward(x), {right->forward(x)}};
  }
  torch::nn::Linear left{nullptr}, right{nullptr};
};
TORCH_MODULE(Pair);

TEST(UnusedParameters, OfResultsThatTheLossDoesNotUseAreFine) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Pair model = seeded<Pair>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    for (int step = 0; step < 3; ++step) {
      const Batch batch = batch_of(1, 2);
      const auto [left, right] = ddp.forward(batch.data);
      sum_of_squares(step == 1 ? right.at(0) : left, batch.target).backward();
    }
  });
}

// The gradients of the first pass are not reduced, and an optimizer may have stepped with them.
TEST(UnusedParameters, OfAPassMayNotGetTheirGradientsFromASecondOne) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    using Options = DistributedDataParallelOptions;
    for (const Options& options : {Options(), Options().gradient_as_bucket_view(true)}) {
      Pair model = seeded<Pair>(1);
      DistributedDataParallel ddp(model, group, options);
      const Batch batch = batch_of(1, 2);
      const auto [left, right] = ddp.forward(batch.data);
      sum_of_squares(left, batch.target).backward();
      const at::Tensor later = sum_of_squares(right.at(0), batch.target);
      expect_error([&] { later.backward(); },
                   {"[parallel.ddp]", "a second one", "add losses and call backward once"});
      rank.meet();
    }
    Pair model = seeded<Pair>(1);
    Pair alone = seeded<Pair>(1);
    DistributedDataParallel ddp(model, group, Options().delay_allreduce(true));
    const Batch batch = batch_of(rank.number(), 2);
    const auto [left, right] = ddp.forward(batch.data);
    sum_of_squares(left, batch.target).backward();
    sum_of_squares(right.at(0), batch.target).backward();
    for (int each = 0; each < 2; ++each) {
      const Batch its = batch_of(each, 2);
      const auto [one, other] = alone->forward(its.data);
      ((sum_of_squares(one, its.target) + sum_of_squares(other.at(0), its.target)) / 2).backward();
    }
    for (const char* const name : {"left.weight", "right.weight"})
      expect_near({model->named_parameters()[name].grad()},
                  {alone->named_parameters()[name].grad()});
  });
}

using NamedTensors = std::unordered_map<std::string, at::Tensor>;
struct NamedImpl : torch::nn::Module {
  NamedImpl() { layer = register_module("layer", torch::nn::Linear(6, 3)); }
  NamedTensors forward(const at::Tensor& x) {
    const at::Tensor y = layer->forward(x);
    return {{"logits", y}, {"aux", y + 1}, {"value", y + 2}};
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Named);

TEST(UnusedParameters, ResultsInAnUnorderedMapKeepTheirNames) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Named model = seeded<Named>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    const at::Tensor x = torch::ones({2, 6});
    const NamedTensors want = model->forward(x);
    const NamedTensors got = ddp.forward(x);
    for (const char* const name : {"logits", "aux", "value"})
      EXPECT_TRUE(torch::equal(got.at(name), want.at(name))) << name;
    got.at("aux").sum().backward();
  });
}

// A second result that is defined in some steps only.
struct OptionalImpl : torch::nn::Module {
  OptionalImpl() { heads = register_module("heads", Heads()); }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x, bool both) {
    return {heads->forward(x, true), both ? heads->forward(x, false) : at::Tensor()};
  }
  Heads heads{nullptr};
};
TORCH_MODULE(Optional);

TEST(UnusedParameters, AreFoundWithUndefinedResults) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Optional model = seeded<Optional>(1);
    Optional alone = seeded<Optional>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    const auto loss_of = [](const std::tuple<at::Tensor, at::Tensor>& results, const Batch& batch) {
      const auto& [left, right] = results;
      const at::Tensor loss = sum_of_squares(left, batch.target);
      return right.defined() ? loss + sum_of_squares(right, batch.target) : loss;
    };
    for (int step = 0; step < 4; ++step) {
      const auto has_both = [&](int of_rank) { return step > 1 && (of_rank == 0 || step == 3); };
      const Batch batch = batch_of(step, 2);
      model->zero_grad();
      alone->zero_grad();
      loss_of(ddp.forward(batch.data, has_both(rank.number())), batch).backward();
      for (int each = 0; each < 2; ++each)
        (loss_of(alone->forward(batch.data, has_both(each)), batch) / 2).backward();
      const auto trained = [](Optional& of) {
        std::vector<at::Tensor> gradients;
        for (const auto& parameter : of->parameters())
          if (parameter.grad().defined()) gradients.push_back(parameter.grad());
        return gradients;
      };
      expect_near(trained(model), trained(alone));
    }
  });
}

// Reducer notes them as used in passes of no_sync() too, whose gradients the program may drop.
TEST(UnusedParameters, WhoseGradientsWereDroppedAreUnused) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    for (const bool set_to_none : {true, false}) {
      Heads model = seeded<Heads>(1);
      Heads alone = seeded<Heads>(1);
      DistributedDataParallel ddp(model, group,
                                  DistributedDataParallelOptions().find_unused_parameters(true));
      const Batch batch = batch_of(1, 4);
      {
        const auto local = ddp.no_sync();
        sum_of_squares(ddp.forward(batch.data, /*use_left=*/true), batch.target).backward();
      }
      for (int step = 0; step < 2; ++step) {
        model->zero_grad(set_to_none);
        alone->zero_grad(set_to_none);
        const Batch rows = batch.rows(2 * rank.number(), 2 * rank.number() + 2);
        (sum_of_squares(ddp.forward(rows.data, false), rows.target) * 2).backward();
        sum_of_squares(alone->forward(batch.data, false), batch.target).backward();
        EXPECT_EQ(model->left->bias.grad().defined(), !set_to_none);
        expect_near(model->right->parameters(), alone->right->parameters());
        expect_near({model->trunk->weight.grad(), model->right->bias.grad()},
                    {alone->trunk->weight.grad(), alone->right->bias.grad()});
      }
    }
  });
}

// A table with sparse gradients, which a step may leave out.
struct TableImpl : torch::nn::Module {
  TableImpl() {
    table = register_module("table",
                            torch::nn::Embedding(torch::nn::EmbeddingOptions(5, 6).sparse(true)));
    head = register_module("head", torch::nn::Linear(6, 3));
    to(torch::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, bool looks_up) {
    if (!looks_up) return head->forward(x);
    return head->forward(x + table->forward(torch::arange(x.size(0))));
  }
  torch::nn::Embedding table{nullptr};
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(Table);

TEST(UnusedParameters, MayHaveSparseGradients) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    // backward() may have a list of the tensors that get gradients.
    for (const bool lists_inputs : {false, true}) {
      Table model = seeded<Table>(1);
      Table alone = seeded<Table>(1);
      DistributedDataParallel ddp(model, group,
                                  DistributedDataParallelOptions().find_unused_parameters(true));
      const auto looks_up = [](int step, int of_rank) {
        return step == 2 || (step == 1 && of_rank == 1);
      };
      const std::vector<at::Tensor> parameters = model->parameters();
      std::optional<at::TensorList> inputs;
      if (lists_inputs) inputs = parameters;
      for (int step = 0; step < 4; ++step) {
        SCOPED_TRACE(std::to_string(step) + (lists_inputs ? ", with inputs" : ""));
        model->zero_grad();
        alone->zero_grad();
        const Batch batch = batch_of(step, 4);
        for (int each = 0; each < 2; ++each) {
          const Batch rows = batch.rows(2 * each, 2 * each + 2);
          if (each == rank.number()) {
            sum_of_squares(ddp.forward(rows.data, looks_up(step, each)), rows.target)
                .backward({}, std::nullopt, /*create_graph=*/false, inputs);
          }
          (sum_of_squares(alone->forward(rows.data, looks_up(step, each)), rows.target) / 2)
              .backward();
        }
        const at::Tensor& got = model->table->weight.grad();
        const at::Tensor& want = alone->table->weight.grad();
        ASSERT_EQ(got.defined(), want.defined());
        if (got.defined()) expect_near({got.to_dense()}, {want.to_dense()});
        expect_near({model->head->weight.grad()}, {alone->head->weight.grad()});
      }
    }
  });
}

TEST(StaticGraph, WithoutASparseGradientIsAnErrorOfTheFirstStep) {
  run_ranks(2, [](Rank&) {
    const auto group = comm::init();
    Table model = seeded<Table>(1);
    DistributedDataParallel ddp(model, group, DistributedDataParallelOptions().static_graph(true));
    const Batch batch = batch_of(1, 2);
    const auto step = [&](bool looks_up) {
      model->zero_grad();
      sum_of_squares(ddp.forward(batch.data, looks_up), batch.target).backward();
    };
    expect_error([&] { step(false); },
                 {"[parallel.ddp]", "static_graph(true)", "'table.weight'", "sparse(false)"});
    step(true);  // nothing was sent
  });
}

// A result that is a parameter, as the scale of a contrastive loss.
struct ScaledImpl : torch::nn::Module {
  ScaledImpl() {
    layer = register_module("layer", torch::nn::Linear(6, 3));
    scale = register_parameter("scale", torch::ones({1}));
    to(torch::kDouble);
  }
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& x) {
    return {layer->forward(x), scale};
  }
  torch::nn::Linear layer{nullptr};
  at::Tensor scale;
};
TORCH_MODULE(Scaled);

TEST(UnusedParameters, AreNotThoseThatAreResults) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Scaled model = seeded<Scaled>(1);
    Scaled alone = seeded<Scaled>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    const auto loss_of = [](const std::tuple<at::Tensor, at::Tensor>& results, const Batch& batch) {
      return sum_of_squares(std::get<0>(results) * std::get<1>(results), batch.target);
    };
    for (int step = 0; step < 2; ++step) {
      model->zero_grad();
      alone->zero_grad();
      const Batch batch = batch_of(step, 4);
      const Batch rows = batch.rows(2 * rank.number(), 2 * rank.number() + 2);
      (loss_of(ddp.forward(rows.data), rows) * 2).backward();
      loss_of(alone->forward(batch.data), batch).backward();
      expect_near({model->scale.grad(), model->layer->weight.grad()},
                  {alone->scale.grad(), alone->layer->weight.grad()});
    }
  });
}

// c10d's own message would be about Python.
TEST(UnusedParameters, InAPenaltyOfTheLossAreNamed) {
  run_ranks(2, [](Rank& rank) {
    const auto group = comm::init();
    Heads model = seeded<Heads>(1);
    DistributedDataParallel ddp(model, group,
                                DistributedDataParallelOptions().find_unused_parameters(true));
    const Batch batch = batch_of(1, 2);
    const auto penalty = [&] { return model->never->bias.square().sum(); };
    at::Tensor loss = sum_of_squares(ddp.forward(batch.data, true), batch.target);
    const auto by_hand = torch::autograd::grad({penalty()}, {model->never->bias});
    EXPECT_TRUE(by_hand[0].defined());  // changes no gradient
    loss.backward();
    loss = sum_of_squares(ddp.forward(batch.data, true), batch.target) + penalty();
    expect_error([&] { loss.backward(); },
                 {"[parallel.ddp]", "find_unused_parameters(true)", "'never.bias'",
                  "rank " + std::to_string(rank.number()), "delay_allreduce(true)"});
  });
}

}  // namespace
}  // namespace semitone::parallel::ddp_unused_parameters_test
