#include "semitone/core/map_tensors.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <gtest/gtest.h>

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
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
