// Checkpoints of somebody else, whose files contain code. Loading them does not run it.

#include "src/checkpoint/archive_code.h"

#include "semitone/checkpoint.h"
#include "semitone/core/error.h"
#include "src/checkpoint/manifest.h"
#include "src/core/checksum.h"
#include "tests/checkpoint/training.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"

#include <torch/script.h>
#include <torch/torch.h>

#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace semitone::checkpoint::test {
namespace archive_code {
namespace {

namespace fs = std::filesystem;

using semitone::test::error_of;
using semitone::test::message_of;
using semitone::test::read_text;
using semitone::test::TemporaryFolder;
using semitone::test::write_text;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr auto kMethod = "def forward(self, x: Tensor) -> Tensor:\n  return x\n";

std::string bytes_of(const torch::jit::Module& module) {
  std::ostringstream stream;
  module.save(stream);
  return stream.str();
}

torch::jit::Module module_with(const std::string& code) {
  torch::jit::Module module("Net");
  module.register_parameter("value", torch::full({3}, 0.5), /*is_buffer=*/false);
  module.define(code);
  return module;
}

// Writes a file when it is loaded.
std::string bytes_that_write(const fs::path& file) {
  return bytes_of(
      module_with("def __getstate__(self):\n"
                  "  return 1\n"
                  "def __setstate__(self, state: int):\n"
                  "  self.value = torch.ones([3])\n"
                  "  torch.save(self.value, '" +
                  file.string() + "')\n"));
}

// Puts other bytes in the place of a file, with the checksums that anybody can compute.
void replace(const fs::path& folder, const std::string& entry, const std::string& bytes) {
  using Json = nlohmann::ordered_json;
  write_text(folder / (entry + ".pt"), bytes);
  Json json = Json::parse(read_text(folder / kManifest));
  json.erase("crc32");
  for (Json& file : json["files"]) {
    if (file["name"] != entry) continue;
    file["bytes"] = bytes.size();
    file["crc32"] = checksum_of(bytes);
  }
  json["crc32"] = checksum_of(json.dump(1));
  write_text(folder / kManifest, json.dump(1) + "\n");
}

class InMemory final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit InMemory(std::string bytes) : bytes_(std::move(bytes)) {}
  std::size_t size() const override { return bytes_.size(); }
  std::size_t read(std::uint64_t from, void* to, std::size_t size,
                   const char* /*what*/) const override {
    std::memcpy(to, bytes_.data() + from, size);
    return size;
  }

 private:
  std::string bytes_;
};

// An archive whose records have these names and this text.
std::shared_ptr<InMemory> archive_of(std::initializer_list<std::string> names,
                                     std::string_view text) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, std::size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  for (const std::string& name : names) writer.writeRecord(name, text.data(), text.size());
  writer.writeEndOfFile();
  return std::make_shared<InMemory>(std::move(bytes));
}

// A checkpoint of step 1 with a tensor, and what it was before.
class CheckpointOfSomebodyElse : public ::testing::Test {
 protected:
  CheckpointOfSomebodyElse() {
    checkpoint_.add("number", number_).add("tensor", tensor_);
    checkpoint_.save(1);
    number_ = 8;
    tensor_.fill_(2);
  }

  // Refuses the checkpoint, does not take it for a damaged one, and keeps it.
  void expect_refused(const std::string& part) {
    EXPECT_THAT(message_of<FileError>([&] { checkpoint_.resume(); }),
                AllOf(HasSubstr("[checkpoint.resume] expected values without code in '"),
                      HasSubstr("tensor.pt"), HasSubstr(part), HasSubstr("nothing was loaded")));
    EXPECT_EQ(number_, 8);
    EXPECT_TRUE(same_bits(tensor_, torch::full({3}, 2.0)));
    checkpoint_.save(2);
    EXPECT_THAT(checkpoint_.steps(), ElementsAre(1, 2));
  }

  TemporaryFolder folder_;
  std::int64_t number_ = 4;
  at::Tensor tensor_ = torch::zeros({3});
  Checkpoint checkpoint_{folder_ / "run"};
};

TEST_F(CheckpointOfSomebodyElse, IsRefusedForAMethod) {
  replace(checkpoint_.path_of(1), "tensor", bytes_of(module_with(kMethod)));
  expect_refused("code/__torch__.py");
}

TEST_F(CheckpointOfSomebodyElse, IsRefusedBeforeItsCodeRuns) {
  const fs::path trace = folder_ / "trace";
  const std::string bytes = bytes_that_write(trace);
  std::istringstream stream(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(stream);
  ASSERT_TRUE(fs::remove(trace)) << "LibTorch no longer runs the code";
  replace(checkpoint_.path_of(1), "tensor", bytes);
  expect_refused("code/__torch__.py");
  EXPECT_FALSE(fs::exists(trace));
}

TEST_F(CheckpointOfSomebodyElse, IsLoadedWithoutCode) {
  torch::jit::Module module("Other");
  module.register_parameter("value", torch::full({3}, 0.5), /*is_buffer=*/false);
  replace(checkpoint_.path_of(1), "tensor", bytes_of(module));
  EXPECT_EQ(checkpoint_.resume(), 1);
  EXPECT_EQ(number_, 4);
  EXPECT_TRUE(same_bits(tensor_, torch::full({3}, 0.5)));
}

// The file of a TorchScript model has its code, which is not read.
TEST(CheckpointOfAScript, IsLoadedWithoutItsCode) {
  const TemporaryFolder folder;
  const fs::path trace = folder / "trace";
  torch::jit::Module net = module_with(kMethod);
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("net", net);
  checkpoint.save(1);
  const at::Tensor value = net.attr("value").toTensor();
  value.detach().fill_(3);
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(same_bits(value.detach(), torch::full({3}, 0.5)));

  torch::jit::Module other = module_with("def forward(self, x: Tensor):\n  return self.value\n");
  other.setattr("value", torch::full({3}, 0.25));
  replace(checkpoint.path_of(1), "net", bytes_of(other));
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(same_bits(value.detach(), torch::full({3}, 0.25)));

  replace(checkpoint.path_of(1), "net", bytes_that_write(trace));
  EXPECT_NE(message_of<FileError>([&] { checkpoint.resume(); }), "");
  EXPECT_FALSE(fs::exists(trace));
  EXPECT_TRUE(same_bits(value.detach(), torch::full({3}, 0.25)));
}

TEST(CheckpointOfAScript, CannotKeepTensorsThatOnlyItsCodeCanRead) {
  const TemporaryFolder folder;
  torch::jit::Module net = module_with(
      "def __getstate__(self):\n"
      "  return self.value\n"
      "def __setstate__(self, state: Tensor):\n"
      "  self.value = state\n");
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("net", net);
  EXPECT_THAT(error_of([&] { checkpoint.save(1); }), HasSubstr("__getstate__ in '__torch__.Net'"));
}

// resume() takes parameters and buffers only, and it knows their sizes.
TEST(CheckpointOfAScript, MayHaveOtherTensorsThatCannotBeRead) {
  const TemporaryFolder folder;
  torch::jit::Module packed("Packed");
  packed.register_attribute("value", at::TensorType::get(), torch::ones(3));
  packed.define(
      "def __getstate__(self):\n"
      "  return (self.value, 1)\n"
      "def __setstate__(self, state: Tuple[Tensor, int]):\n"
      "  self.value = state[0]\n");
  torch::jit::Module net("Net");
  net.register_module("packed", packed);
  net.register_attribute("quantised", at::TensorType::get(),
                         torch::quantize_per_tensor(torch::ones(3), 0.1, 0, torch::kQInt8));
  net.register_buffer("mask", torch::ones({1}, torch::kByte).expand({(1 << 24) + 1}));
  net.register_parameter("weight", torch::full({3}, 2.0), /*is_buffer=*/false);
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("net", net);
  checkpoint.save(1);
  net.attr("weight").toTensor().data().zero_();
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(torch::equal(net.attr("weight").toTensor(), torch::full({3}, 2.0)));
}

// What resume() would refuse.
TEST(CheckpointOfAnObject, WithCodeIsNotWritten) {
  const TemporaryFolder folder;
  struct HasCode {
    void save(torch::serialize::OutputArchive& archive) const {
      archive.write("net", c10::IValue(module_with(kMethod)._ivalue()));
    }
    void load(torch::serialize::InputArchive& /*archive*/) {}
  } object;
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("object", object);
  EXPECT_THAT(error_of([&] { checkpoint.save(1); }),
              AllOf(HasSubstr("values without code"), HasSubstr("__torch__.Net")));
  EXPECT_THAT(checkpoint.steps(), ElementsAre());
}

// LibTorch writes them, and cannot read them back.
TEST(CheckpointOfAModel, WithNamesThatCannotBeReadBackIsNotWritten) {
  const TemporaryFolder folder;
  for (const std::string name : {"in", "is", "class", "None", "a\"b", "a\\b", "a\nb"}) {
    SCOPED_TRACE(name);
    torch::nn::Module model;
    model.register_module(name, torch::nn::Linear(2, 2));
    Checkpoint checkpoint(folder / "run");
    checkpoint.add("model", model);
    EXPECT_THAT(error_of([&] { checkpoint.save(1); }),
                AllOf(HasSubstr("names of modules"), HasSubstr("rename it")));
    EXPECT_THAT(checkpoint.steps(), ElementsAre());
  }
}

TEST(CheckpointOfAModel, HasNamesThatAreLikeWordsOfCode) {
  const TemporaryFolder folder;
  torch::nn::Module model;
  for (const std::string name :
       {"input", "inner", "class_", "_in", "in2", "IN", "a-b", "0", "match", "self", "print", "é"})
    model.register_module(name, torch::nn::Linear(2, 2));
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("model", model);
  checkpoint.save(1);
  const at::Tensor weight = model.parameters()[0];
  const at::Tensor saved = weight.detach().clone();
  const torch::NoGradGuard no_grad;
  weight.zero_();
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_TRUE(torch::equal(weight, saved));
}

TEST(CheckpointOfAnObject, KeepsValuesOfAllKinds) {
  const TemporaryFolder folder;
  struct HasValues {
    void save(torch::serialize::OutputArchive& archive) const {
      const auto write = [&](const char* key, const c10::IValue& value) {
        archive.write(key, value);
      };
      write("0", 1.5);
      write("a/b (c) # 'd'", 7);
      write("list", std::vector<std::int64_t>{1, 2});
      write("tuple", c10::ivalue::Tuple::create({c10::IValue(1), c10::IValue("a")}));
      write("empty", c10::ivalue::Tuple::create(std::vector<c10::IValue>()));
      write("none", c10::IValue());
      write("device", c10::Device(c10::kCPU));
      c10::Dict<std::string, at::Tensor> tensors;
      tensors.insert("key", torch::ones({1}));
      write("dict", tensors);
      torch::serialize::OutputArchive inner;
      inner.write("tensor", torch::ones({2}));
      archive.write("inner", inner);
    }
    void load(torch::serialize::InputArchive& archive) { keys = archive.keys(); }
    std::vector<std::string> keys;
  } object;
  Checkpoint checkpoint(folder / "run");
  checkpoint.add("object", object);
  checkpoint.save(1);
  EXPECT_EQ(checkpoint.resume(), 1);
  EXPECT_THAT(object.keys, ElementsAre("0", "a/b (c) # 'd'", "list", "tuple", "empty", "none",
                                       "device", "dict", "inner"));
}

TEST(ArchiveCode, HasAttributesOnly) {
  for (const char* const code : {
           "",
           "class Module(Module):\n  __parameters__ = []\n  __buffers__ = []\n",
           "class Module(Module):\n  __parameters__ = [\"a\", \"b/0\", ]\n  a : Tensor\n",
           "class A(Module):\n  __annotations__ = []\n  __annotations__[\"0\"] = __torch__.a_3.B\n",
           "class Pair(NamedTuple):\n  a : int\n  b : Tuple[Dict[str, Tensor], Tuple[()]]\n",
       })
    EXPECT_TRUE(has_attributes_only(code)) << code;
  for (const char* const line : {
           "  def forward(self):",
           "  a : Final[int] = 3",
           "  a : int = torch.save(1, \"a\")",
           "  a : torch.save(1)",
           "  a = 3",
           "\ta : int",
           "  a : int; def f(): pass",
           "  a : int # text",
           "  __parameters__ = [\"a\" + f()]",
           "  __parameters__ = [\"a\\\", f(), \"\"]",
           "  __annotations__[\"\"\"a\"] = f()",
           "  __annotations__ = [f()]",
           "class A(Enum):",
           "class A(Interface):",
           "import os",
           "def f():",
           "f()",
       })
    EXPECT_FALSE(has_attributes_only("class A(Module):\n" + std::string(line) + "\n")) << line;
}

TEST(ArchiveCode, IsFoundUnderEveryName) {
  const auto refused = [](std::initializer_list<std::string> names, std::string_view part) {
    EXPECT_THAT(message_of<FileError>([&] { require_no_code(archive_of(names, "f()"), "x.pt"); }),
                HasSubstr(std::string(part)));
  };
  require_no_code(archive_of({"data.pkl", "code/a.py.debug_pkl"}, "f()"), "x.pt");
  refused({"code/a/b.py"}, "code in code/a/b.py");
  refused({"CODE/a.PY"}, "code in CODE/a.PY");
  refused({"code/a"}, "code in code/a");
  refused({"model.json"}, "before PyTorch 1.4");
  refused({"data/0", "DATA/0"}, "two records of the name DATA/0");
}

TEST(ManifestSize, ThatCannotBeReadIsNotWritten) {
  Manifest manifest;
  // JSON has six bytes for each of them.
  manifest.settings["--text"] = std::string((std::size_t{64} << 20) / 6, '\1');
  EXPECT_THAT(error_of([&] { to_text(manifest); }),
              AllOf(HasSubstr("a manifest of at most 64 MiB"), HasSubstr("shorter settings")));
}

}  // namespace
}  // namespace archive_code
}  // namespace semitone::checkpoint::test
