#include "semitone/amp/cast_tree.h"

#include "tests/support/tensors.h"

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

namespace semitone::amp {
namespace {

constexpr auto kFp32 = torch::kFloat;
constexpr auto kFp16 = torch::kHalf;
constexpr auto kBf16 = torch::kBFloat16;

TEST(CastFloating, ConvertsFp32AndThe16BitDtypes) {
  for (const auto from : {kFp32, kFp16, kBf16}) {
    for (const auto to : {kFp32, kFp16, kBf16})
      EXPECT_EQ(cast_floating(torch::ones({2}, from), to).scalar_type(), to);
  }
}

TEST(CastFloating, LeavesTheRestAlone) {
  for (const auto dtype : {torch::kLong, torch::kInt, torch::kBool, torch::kByte,
                           torch::kComplexFloat, torch::kDouble})
    EXPECT_EQ(cast_floating(torch::ones({2}, dtype), kFp16).scalar_type(), dtype);
  EXPECT_FALSE(cast_floating(at::Tensor(), kFp16).defined());
}

TEST(CastFloating, TakesFp64WhereAskedTo) {
  EXPECT_EQ(cast_floating(torch::ones({2}, torch::kDouble), kFp16, true).scalar_type(), kFp16);
  EXPECT_EQ(cast_floating(torch::ones({2}, torch::kLong), kFp16, true).scalar_type(), torch::kLong);
}

TEST(CastFloating, ReturnsTheSameTensorIfNothingHasToBeDone) {
  const auto tensor = torch::ones({2});
  EXPECT_TRUE(cast_floating(tensor, kFp32).is_same(tensor));
}

TEST(CastFloating, IsRecordedByAutograd) {
  const auto leaf = torch::ones({2}).requires_grad_();
  cast_floating(leaf, kFp16).sum().backward();
  EXPECT_EQ(leaf.grad().scalar_type(), kFp32);
}

// ---- containers --------------------------------------------------------------------------------

struct Batch {
  at::Tensor data;
  int label = 0;
  template <typename Transform>
  Batch map_tensors(const Transform& transform) const {
    return {transform(data), label};
  }
};

const auto kLower = [](const at::Tensor& tensor) { return cast_floating(tensor, kBf16); };

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
  const auto elements = cast_floating(value, kBf16).toTuple()->elements().vec();
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
  const auto result = script->run_method("f", cast_floating(c10::IValue(dict), kBf16));
  EXPECT_EQ(result.toTensorVector()[0].scalar_type(), kBf16);
}

TEST(MapIValues, NamedTuplesStayNamed) {
  const auto type = c10::TupleType::createNamed(
      c10::QualifiedName("Point"), std::vector<std::string>{"x", "n"},
      std::vector<c10::TypePtr>{c10::TensorType::get(), c10::IntType::get()});
  const c10::IValue point = c10::ivalue::Tuple::createNamed({torch::ones({2}), 3}, type);
  const c10::IValue cast = cast_floating(point, kBf16);
  ASSERT_NE(cast.toTuple()->type()->schema(), nullptr);
  EXPECT_EQ(cast.toTuple()->type()->name()->name(), "Point");
  EXPECT_EQ(cast.toTuple()->elements()[0].toTensor().scalar_type(), kBf16);
}

TEST(MapIValues, WhatDoesNotChangeStaysTheSameObject) {
  const c10::IValue numbers(c10::List<std::int64_t>({1, 2}));
  EXPECT_TRUE(cast_floating(numbers, kBf16).is(numbers));
  const c10::IValue tensors(std::vector<at::Tensor>{torch::ones({2}, kBf16)});
  EXPECT_TRUE(cast_floating(tensors, kBf16).is(tensors));
  const c10::IValue words(c10::List<std::string>({"a"}));
  EXPECT_TRUE(cast_floating(words, kBf16).is(words))
      << "scripts may write to a list they are given";
}

}  // namespace
}  // namespace semitone::amp
