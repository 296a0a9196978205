#include "semitone/core/map_tensors.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace semitone {
namespace {

constexpr auto kFp32 = torch::kFloat;
constexpr auto kBf16 = torch::kBFloat16;

struct Batch {
  at::Tensor data;
  int label = 0;
  template <typename Transform>
  Batch map_tensors(const Transform& transform) const {
    return {transform(data), label};
  }
};

const auto kLower = [](const at::Tensor& tensor) { return tensor.to(kBf16); };

TEST(MapTensors, LooksIntoStandardContainers) {
  const auto x = torch::ones({2});
  EXPECT_EQ(map_tensors(x, kLower).scalar_type(), kBf16);
  EXPECT_EQ(map_tensors(std::vector<at::Tensor>{x, x}, kLower)[1].scalar_type(), kBf16);
  EXPECT_EQ(map_tensors(std::array<at::Tensor, 2>{x, x}, kLower)[1].scalar_type(), kBf16);
  EXPECT_EQ(map_tensors(std::pair(x, 3), kLower).first.scalar_type(), kBf16);
  EXPECT_EQ(map_tensors(std::pair(x, 3), kLower).second, 3);
  EXPECT_EQ(std::get<1>(map_tensors(std::tuple(1.5, x, std::string("s")), kLower)).scalar_type(),
            kBf16);
  EXPECT_EQ(map_tensors(std::optional<at::Tensor>(x), kLower)->scalar_type(), kBf16);
  EXPECT_FALSE(map_tensors(std::optional<at::Tensor>(), kLower).has_value());
  EXPECT_EQ(map_tensors(std::map<int, at::Tensor>{{1, x}}, kLower).at(1).scalar_type(), kBf16);
  EXPECT_EQ(map_tensors(std::unordered_map<std::string, at::Tensor>{{"a", x}}, kLower)
                .at("a")
                .scalar_type(),
            kBf16);
}

TEST(MapTensors, GoesThroughAMapItMadeInTheSameOrder) {
  std::unordered_map<int, at::Tensor> map;
  for (int i = 0; i < 20; ++i) map.emplace(i * 37, torch::full({1}, i));
  const auto order = [](const auto& of) {
    std::vector<int> values;
    static_cast<void>(map_tensors(of, [&values](const at::Tensor& tensor) {
      values.push_back(tensor.item<int>());
      return tensor;
    }));
    return values;
  };
  const auto copy = map_tensors(map, [](const at::Tensor& tensor) { return tensor.clone(); });
  EXPECT_EQ(order(copy), order(map));
}

TEST(MapTensors, LooksIntoNestedOnes) {
  const auto x = torch::ones({2});
  const std::map<std::string, std::vector<std::tuple<at::Tensor, std::optional<at::Tensor>>>>
      nested{{"a", {{x, x}, {x, std::nullopt}}}};
  const auto mapped = map_tensors(nested, kLower);
  EXPECT_EQ(std::get<0>(mapped.at("a")[0]).scalar_type(), kBf16);
  EXPECT_EQ(std::get<1>(mapped.at("a")[0])->scalar_type(), kBf16);
  EXPECT_FALSE(std::get<1>(mapped.at("a")[1]).has_value());
  EXPECT_EQ(std::get<0>(nested.at("a")[0]).scalar_type(), kFp32) << "the original stays";
}

TEST(MapTensors, LooksIntoTypesThatOffer) {
  const Batch batch{torch::ones({2}), 7};
  EXPECT_EQ(map_tensors(batch, kLower).data.scalar_type(), kBf16);
  EXPECT_EQ(map_tensors(std::vector<Batch>{batch}, kLower)[0].label, 7);
  EXPECT_EQ(map_tensors(std::vector<Batch>{batch}, kLower)[0].data.scalar_type(), kBf16);
}

struct Pair {
  at::Tensor a;
  at::Tensor b;
};
struct Everything {
  Pair pair;
  std::vector<Pair> pairs;
  std::optional<at::Tensor> maybe;
  std::array<at::Tensor, 2> two;
  std::map<std::string, Batch> batches;
  const std::string name;
  double number = 0.5;
};
struct Arrays {
  int counts[3];
  at::Tensor tensors[2];
  at::Tensor last;
};
struct Tree {
  at::Tensor value;
  std::vector<Tree> children;
};
struct WithReference {
  const std::string& name;
  at::Tensor tensor;
};
struct OnlyMoves {
  std::unique_ptr<int> number;
  at::Tensor tensor;
};
struct Derived : Pair {
  at::Tensor c;
};
struct NothingInside {
  std::string name;
  int number;
};
class Closed {
 public:
  const std::string& name() const { return name_; }

 private:
  std::string name_ = "closed";
};
class Declared : public Closed {};

}  // namespace
}  // namespace semitone

template <>
inline constexpr bool semitone::holds_no_tensors<semitone::Declared> = true;

namespace semitone {
namespace {

TEST(MapTensors, LooksIntoStructs) {
  const auto x = torch::ones({2});
  const Everything before{{x, x}, {{x, x}}, x, {x, x}, {{"a", {x, 7}}}, "name"};
  const Everything after = map_tensors(before, kLower);
  for (const at::Tensor& tensor : {after.pair.a, after.pair.b, after.pairs[0].b, *after.maybe,
                                   after.two[1], after.batches.at("a").data})
    EXPECT_EQ(tensor.scalar_type(), kBf16);
  EXPECT_EQ(before.pair.a.scalar_type(), kFp32);
  EXPECT_EQ(after.name, "name");
  EXPECT_EQ(after.number, 0.5);
  EXPECT_EQ(after.batches.at("a").label, 7);
}

TEST(MapTensors, LooksIntoStructsOfEveryKind) {
  const auto x = torch::ones({2});
  const Arrays arrays = map_tensors(Arrays{{1, 2, 3}, {x, x}, x}, kLower);
  EXPECT_EQ(arrays.counts[2], 3);
  EXPECT_EQ(arrays.tensors[1].scalar_type(), kBf16);
  EXPECT_EQ(arrays.last.scalar_type(), kBf16);
  const Tree tree = map_tensors(Tree{x, {{x, {}}, {x, {{x, {}}}}}}, kLower);
  EXPECT_EQ(tree.children[1].children[0].value.scalar_type(), kBf16);
  const std::string name = "name";
  const WithReference with_reference = map_tensors(WithReference{name, x}, kLower);
  EXPECT_EQ(&with_reference.name, &name);
  EXPECT_EQ(with_reference.tensor.scalar_type(), kBf16);
  const OnlyMoves moved = map_tensors(OnlyMoves{std::make_unique<int>(3), x}, kLower);
  EXPECT_EQ(*moved.number, 3);
  EXPECT_EQ(moved.tensor.scalar_type(), kBf16);
}

TEST(MapTensors, LooksIntoWhatElseModelsTake) {
  const auto x = torch::ones({2});
  EXPECT_EQ(
      std::get<at::Tensor>(map_tensors(std::variant<int, at::Tensor>(x), kLower)).scalar_type(),
      kBf16);
  EXPECT_EQ(map_tensors(std::deque<at::Tensor>{x}, kLower)[0].scalar_type(), kBf16);
  EXPECT_EQ(map_tensors(c10::List<at::Tensor>({x}), kLower).get(0).scalar_type(), kBf16);
  const std::vector<at::Tensor> owner{x, x};
  const std::vector<at::Tensor> list = map_tensors(at::TensorList(owner), kLower);
  EXPECT_EQ(list.at(1).scalar_type(), kBf16);
  const auto packed = torch::nn::utils::rnn::pack_padded_sequence(
      torch::ones({3, 2, 4}), torch::tensor({3, 2}), false, true);
  const auto lowered = map_tensors(packed, kLower);
  EXPECT_EQ(lowered.data().scalar_type(), kBf16);
  EXPECT_TRUE(at::equal(lowered.batch_sizes(), packed.batch_sizes()));
}

TEST(MapTensors, KnowsWhatItCannotLookInto) {
  using detail::Holding;
  using detail::holding;
  static_assert(holding<Pair>() == Holding::tensors);
  static_assert(holding<Tree>() == Holding::tensors);
  static_assert(holding<NothingInside>() == Holding::none);
  static_assert(holding<Closed>() == Holding::unknown);
  static_assert(holding<std::vector<Closed>>() == Holding::unknown);
  static_assert(holding<Derived>() == Holding::unknown, "a base class hides its fields");
  static_assert(holding<Declared>() == Holding::none);
  static_assert(holding<std::function<void()>>() == Holding::none);
  static_assert(holding<std::shared_ptr<Pair>>() == Holding::none);
  static_assert(holding<torch::nn::Linear>() == Holding::none);
  static_assert(holding<c10::Device>() == Holding::none);
  static_assert(holding<at::TensorOptions>() == Holding::none);
  static_assert(holding<at::Scalar>() == Holding::none);
  static_assert(holding<at::IntArrayRef>() == Holding::none);
  EXPECT_EQ(map_tensors(Declared(), kLower).name(), "closed");
  EXPECT_EQ(map_tensors(NothingInside{"x", 1}, kLower).name, "x");
}

TEST(MapTensors, ReturnsEverythingElseAsItIs) {
  EXPECT_EQ(map_tensors(5, kLower), 5);
  EXPECT_EQ(map_tensors(std::string("text"), kLower), "text");
  EXPECT_STREQ(map_tensors("text", kLower), "text");
  EXPECT_EQ(map_tensors(std::vector<bool>{true, false}, kLower), (std::vector<bool>{true, false}));
  EXPECT_EQ(*map_tensors(std::make_unique<int>(3), kLower), 3) << "what can only be moved is moved";
}

TEST(MapTensors, CallsTheTransformOncePerTensor) {
  int calls = 0;
  const auto count = [&calls](const at::Tensor& tensor) {
    ++calls;
    return tensor;
  };
  const auto x = torch::ones({2});
  map_tensors(std::tuple(x, std::vector<at::Tensor>{x, x}, 4, c10::IValue(x)), count);
  EXPECT_EQ(calls, 4);
}

// ---- IValues -----------------------------------------------------------------------------------

TEST(MapIValues, LooksIntoListsTuplesAndDicts) {
  const auto x = torch::ones({2});
  c10::Dict<std::string, at::Tensor> dict;
  dict.insert("a", x);
  c10::List<std::optional<at::Tensor>> maybe;
  maybe.push_back(x);
  maybe.push_back(std::nullopt);
  const c10::IValue value = c10::ivalue::Tuple::create(
      {x, std::vector<at::Tensor>{x}, dict, 5, "text", maybe, c10::IValue()});
  const auto elements = map_tensors(value, kLower).toTuple()->elements().vec();
  EXPECT_EQ(elements[0].toTensor().scalar_type(), kBf16);
  EXPECT_EQ(elements[1].toTensorVector()[0].scalar_type(), kBf16);
  EXPECT_EQ(elements[2].toGenericDict().at("a").toTensor().scalar_type(), kBf16);
  EXPECT_EQ(elements[3].toInt(), 5);
  EXPECT_EQ(elements[4].toStringRef(), "text");
  EXPECT_EQ(elements[5].toList().get(0).toTensor().scalar_type(), kBf16);
  EXPECT_TRUE(elements[5].toList().get(1).isNone());
  EXPECT_TRUE(elements[6].isNone());
  EXPECT_EQ(x.scalar_type(), kFp32);
}

TEST(MapIValues, KeepTheTypesThatScriptsAskFor) {
  const auto script = torch::jit::compile(R"(
def f(x: Dict[str, Tuple[Tensor, List[Tensor]]]) -> List[Tensor]:
    return x["a"][1]
)");
  c10::Dict<std::string, std::tuple<at::Tensor, std::vector<at::Tensor>>> dict;
  dict.insert("a", std::tuple(torch::ones({2}), std::vector<at::Tensor>{torch::ones({3})}));
  const auto result = script->run_method("f", map_tensors(c10::IValue(dict), kLower));
  EXPECT_EQ(result.toTensorVector()[0].scalar_type(), kBf16);
}

TEST(MapIValues, NamedTuplesStayNamed) {
  const auto type = c10::TupleType::createNamed(
      c10::QualifiedName("Point"), std::vector<std::string>{"x", "n"},
      std::vector<c10::TypePtr>{c10::TensorType::get(), c10::IntType::get()});
  const c10::IValue point = c10::ivalue::Tuple::createNamed({torch::ones({2}), 3}, type);
  const c10::IValue cast = map_tensors(point, kLower);
  ASSERT_NE(cast.toTuple()->type()->schema(), nullptr);
  EXPECT_EQ(cast.toTuple()->type()->name()->name(), "Point");
  EXPECT_EQ(cast.toTuple()->elements()[0].toTensor().scalar_type(), kBf16);
}

TEST(MapIValues, WhatDoesNotChangeStaysTheSameObject) {
  const c10::IValue numbers(c10::List<std::int64_t>({1, 2}));
  EXPECT_TRUE(map_tensors(numbers, kLower).is(numbers));
  const c10::IValue tensors(std::vector<at::Tensor>{torch::ones({2}, kBf16)});
  EXPECT_TRUE(map_tensors(tensors, kLower).is(tensors));
  const c10::IValue words(c10::List<std::string>({"a"}));
  EXPECT_TRUE(map_tensors(words, kLower).is(words)) << "scripts may write to a list they are given";
}

}  // namespace
}  // namespace semitone
