#include "semitone/weights/file.h"

#include "semitone/core/error.h"
#include "tests/support/errors.h"
#include "tests/support/temporary_folder.h"
#include "tests/support/toy_nets.h"
#include "tests/weights/fixtures.h"

#include <torch/serialize.h>

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <string>

namespace semitone::weights {
namespace {

using test::difference;
using test::expect_error;
using test::expected_tensors;
using test::python_file;
using test::TemporaryFolder;
using test::ToyNet;
using test::ToyNetOptions;
using test::write_text;

// A file of Python's, read.
Contents read_python(const std::string& name, const ReadOptions& options = {}) {
  const TemporaryFolder folder;
  write_text(folder / name, python_file(name));
  return read(folder / name, options);
}

class PythonFiles : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(PythonFiles, HaveTheTensorsThatPythonSaved) {
  const auto [file, tensors] = GetParam();
  EXPECT_EQ(difference(read_python(file).tensors, expected_tensors(tensors)), "");
}

INSTANTIATE_TEST_SUITE_P(
    Weights, PythonFiles,
    ::testing::Values(std::pair("state_dict.pt", "state_dict"),
                      std::pair("protocol5.pt", "state_dict"), std::pair("script.pt", "state_dict"),
                      std::pair("parameters.pt", "parameters"),
                      std::pair("defaultdict.pt", "state_dict"),
                      std::pair("before_1_6_protocol4.pt", "state_dict"),
                      std::pair("dtypes.pt", "dtypes"), std::pair("complex128.pt", "complex128"),
                      std::pair("dtypes.safetensors", "dtypes"), std::pair("views.pt", "views")));

TEST(Weights, FilesOfBefore16HaveAllTensors) {
  const StateDict found = read_python("before_1_6.pt").tensors;
  StateDict expected = expected_tensors("state_dict");
  for (const auto& item : expected_tensors("views"))
    expected.insert("views." + item.key(), item.value());
  EXPECT_EQ(difference(found, expected), "");
}

TEST(Weights, ReadTellsTheFormatAndTheMetadata) {
  EXPECT_EQ(read_python("state_dict.pt").format, Format::pytorch);
  EXPECT_EQ(read_python("before_1_6.pt").format, Format::pytorch);
  EXPECT_EQ(read_python("script.pt").format, Format::torchscript);
  const Contents safe = read_python("dtypes.safetensors");
  EXPECT_EQ(safe.format, Format::safetensors);
  EXPECT_EQ(safe.metadata.at("step"), "12");
}

TEST(Weights, AnEntryOfACheckpointIsReadByItsName) {
  expect_error([] { read_python("checkpoint.pt"); }, {"'state_dict'", "entry()"});
  const auto entry = [](const char* name) { return ReadOptions().entry(name); };
  EXPECT_EQ(difference(read_python("checkpoint.pt", entry("state_dict")).tensors,
                       expected_tensors("state_dict")),
            "");
  const StateDict state = read_python("checkpoint.pt", entry("optimizer.state")).tensors;
  EXPECT_EQ(state["0.step"].item<double>(), 3.0);
  // Keys may be integers, and entries in lists are numbered.
  const StateDict first = read_python("checkpoint.pt", entry("optimizer.state.0")).tensors;
  EXPECT_EQ(first["step"].item<double>(), 3.0);
  EXPECT_EQ(difference(read_python("models.pt", entry("models.1")).tensors,
                       expected_tensors("state_dict")),
            "");
  expect_error([&] { read_python("models.pt", entry("models")); },
               {"a list of 2", "--entry of semitone convert: \"models.0\""});
  expect_error([&] { read_python("models.pt", entry("models.2")); },
               {"'models.2'", "got a list of 2"});
  expect_error([&] { read_python("checkpoint.pt", entry("model")); },
               {"'model'", "entries 'state_dict'"});
}

TEST(Weights, WhatIsNoStateDictIsAnErrorThatSaysWhatItIs) {
  expect_error([] { read_python("module.pt"); }, {"__main__.Net", "state_dict()"});
  expect_error([] { read_python("list.pt"); }, {"a dict of tensors"});
}

TEST(Weights, TensorsThatCannotBeReadAreErrorsAndNotLeftOut) {
  expect_error([] { read_python("sparse.pt"); }, {"'sparse'", "_rebuild_sparse_tensor"});
  expect_error([] { read_python("conjugated.pt"); }, {"resolve_conj()"});
}

// As of a quantised layer, whose __getstate__ returns a tuple.
TEST(Weights, TensorsBehindGetstateAreErrorsAndNotLeftOut) {
  const TemporaryFolder folder;
  torch::jit::Module inner("Packed");
  inner.register_attribute("packed", at::TensorType::get(), torch::ones(3));
  inner.define(
      "def __getstate__(self):\n"
      "  return (self.packed, True)\n"
      "def __setstate__(self, state: Tuple[Tensor, bool]):\n"
      "  self.packed = state[0]\n");
  torch::jit::Module module("Net");
  module.register_parameter("weight", torch::zeros({2}), /*is_buffer=*/false);
  module.register_module("inner", inner);
  module.save((folder / "net.pt").string());
  expect_error([&] { read(folder / "net.pt"); },
               {"as attributes of 'inner'", "__getstate__ of __torch__", "Packed"});
}

TEST(Weights, TensorsThatCannotBeReadDoNotMatterInOtherEntries) {
  const auto entry = [](const char* name) { return ReadOptions().entry(name); };
  for (const char* const name : {"quantised.pt", "quantised_before_1_6.pt"}) {
    EXPECT_EQ(
        difference(read_python(name, entry("state_dict")).tensors, expected_tensors("state_dict")),
        "")
        << name;
    expect_error([&] { read_python(name, entry("observer")); },
                 {"'scale'", "_rebuild_qtensor", "dense tensor"});
    expect_error([&] { read_python(name); }, {"several things: 'state_dict', 'observer'"});
  }
}

TEST(Weights, ATensorBesideAStateDictDoesNotMakeAStateDict) {
  expect_error([] { read_python("best.pt"); }, {"several things: 'state_dict'", "entry()"});
}

TEST(Weights, ObjectsOfOtherClassesAreSkipped) {
  EXPECT_EQ(read_python("with_module.pt").tensors.keys(), std::vector<std::string>{"weight"});
  EXPECT_TRUE(read_python("empty.pt").tensors.is_empty());
}

TEST(Weights, NoFunctionThatAPickleNamesIsCalled) {
  const std::filesystem::path trace = "/tmp/semitone-payload-was-run";
  std::filesystem::remove(trace);
  const StateDict found = read_python("payload.pt").tensors;
  EXPECT_TRUE(test::same_bytes(found["weight"], torch::ones(2)));
  EXPECT_FALSE(std::filesystem::exists(trace));
}

TEST(Weights, OtherFilesAreNamedInTheErrorWithOneRemedy) {
  const TemporaryFolder folder;
  const auto expect_named = [&](const std::string& content, const char* format) {
    write_text(folder / "weights", content);
    expect_error([&] { read(folder / "weights"); },
                 {"safetensors, or a file of torch.save", format});
  };
  expect_named("", "an empty file");
  expect_named("version https://git-lfs.github.com/spec/v1\n", "Git LFS");
  expect_named("<!DOCTYPE html><html>", "a web page");
  expect_named("\x89HDF\r\n\x1a\n", "HDF5");
  expect_named("\x1f\x8b\x08 gzipped data", "gzip");
  expect_named("nothing that is known", "another format");
  expect_error([&] { read_python("arrays.npz"); }, {"NumPy (.npz)", "safetensors.numpy.save_file"});
  expect_error([&] { read_python("exported.pt2"); }, {"torch.export (.pt2)", "state_dict"});
  expect_error([&] { read(folder / "missing"); }, {"missing", "No such file"});
  expect_error([&] { read(folder.path()); }, {"a folder"});
}

class RoundTrip : public ::testing::TestWithParam<const char*> {};

TEST_P(RoundTrip, KeepsEveryBit) {
  const TemporaryFolder folder;
  for (const char* const tensors : {"dtypes", "views", "state_dict"}) {
    const StateDict expected = expected_tensors(tensors);
    write(folder / GetParam(), expected);
    EXPECT_EQ(difference(read(folder / GetParam()).tensors, expected), "") << tensors;
  }
}

TEST_P(RoundTrip, KeepsInfinityNanAndNamesOfAnyLetters) {
  const TemporaryFolder folder;
  StateDict tensors;
  constexpr double kInf = std::numeric_limits<double>::infinity();
  tensors.insert("poids.é\n\"", torch::tensor({kInf, -kInf, std::nan(""), -0.0}));
  tensors.insert("empty", torch::empty({0, 4}));
  write(folder / GetParam(), tensors);
  EXPECT_EQ(difference(read(folder / GetParam()).tensors, tensors), "");
}

TEST_P(RoundTrip, RefusesNamesThatAreNotUtf8) {
  const TemporaryFolder folder;
  StateDict tensors;
  tensors.insert("w\xff", torch::ones({1}));
  const auto path = folder / GetParam();
  expect_error([&] { write(path, tensors); }, {"names of tensors in UTF-8"});
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_P(RoundTrip, ASecondSaveReplacesTheFirstAndAFailedOneDoesNot) {
  const TemporaryFolder folder;
  StateDict good;
  good.insert("a", torch::ones(3));
  write(folder / GetParam(), good);
  StateDict bad = good;
  bad.insert("sparse", torch::ones({2, 2}).to_sparse());
  expect_error([&] { write(folder / GetParam(), bad); }, {"'sparse'", "a sparse one"});
  EXPECT_EQ(difference(read(folder / GetParam()).tensors, good), "");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 1);
}

TEST_P(RoundTrip, AFullDiskIsAnErrorWithTheSystemsReason) {
  StateDict tensors;
  tensors.insert("a", torch::ones(100'000));
  const auto format =
      std::string(GetParam()).ends_with("pt") ? Format::pytorch : Format::safetensors;
  expect_error([&] { write("/dev/full", tensors, SaveOptions().format(format)); },
               {"[weights.write]", "No space left on device"});
}

INSTANTIATE_TEST_SUITE_P(Weights, RoundTrip, ::testing::Values("a.safetensors", "a.pt"));

TEST(Weights, TheFormatFollowsTheNameOrTheOption) {
  const TemporaryFolder folder;
  StateDict tensors;
  tensors.insert("a", torch::ones(3));
  write(folder / "a.pth", tensors);
  EXPECT_EQ(read(folder / "a.pth").format, Format::pytorch);
  write(folder / "a.model", tensors, SaveOptions().format(Format::safetensors));
  EXPECT_EQ(read(folder / "a.model").format, Format::safetensors);
  expect_error([&] { write(folder / "b.model", tensors); }, {".safetensors, .pt", "b.model"});
  EXPECT_FALSE(std::filesystem::exists(folder / "b.model"));
}

TEST(Weights, ADtypeCastsFloatingPointTensorsOnlyAndNotToInfinity) {
  const TemporaryFolder folder;
  StateDict tensors;
  tensors.insert("weight", torch::tensor({1.0, 1e6}));
  tensors.insert("count", torch::tensor({7}, torch::kLong));
  write(folder / "a.safetensors", tensors, SaveOptions().dtype(torch::kBFloat16));
  const StateDict found = read(folder / "a.safetensors").tensors;
  EXPECT_EQ(found["weight"].scalar_type(), torch::kBFloat16);
  EXPECT_EQ(found["count"].scalar_type(), torch::kLong);
  expect_error([&] { write(folder / "a.pt", tensors, SaveOptions().dtype(torch::kHalf)); },
               {"'weight'", "range of float16"});
  expect_error([&] { write(folder / "a.pt", tensors, SaveOptions().dtype(torch::kLong)); },
               {"a floating-point dtype"});
}

TEST(Weights, SavedModelsOfLibTorchAreReadToo) {
  const TemporaryFolder folder;
  ToyNet saved_net(ToyNetOptions{.normalised = true});
  torch::save(saved_net, (folder / "net.pt").string());
  const Contents contents = read(folder / "net.pt");
  EXPECT_EQ(contents.format, Format::torchscript);
  EXPECT_EQ(difference(contents.tensors, state_dict(saved_net)), "");
}

TEST(Weights, SavedModelsOfLibTorchHaveDtypesWithoutAClassInPython) {
  const TemporaryFolder folder;
  torch::serialize::OutputArchive archive;
  StateDict saved;
  for (const auto dtype : {torch::kFloat8_e4m3fn, torch::kFloat8_e5m2, torch::kUInt16,
                           torch::kUInt32, torch::kUInt64}) {
    saved.insert(c10::toString(dtype), torch::arange(3).to(dtype));
    archive.write(c10::toString(dtype), saved[c10::toString(dtype)], /*is_buffer=*/true);
  }
  archive.save_to((folder / "net.pt").string());
  EXPECT_EQ(difference(read(folder / "net.pt").tensors, saved), "");
}

// Every file, cut off at 150 places and with a byte changed there, is read or is an Error: no crash,
// no other exception, no allocation beyond what the file could hold.
TEST(Weights, DamagedFilesAreErrorsOrHarmless) {
  const TemporaryFolder folder;
  const auto try_read = [&](const std::string& content) {
    write_text(folder / "a", content);
    try {
      read(folder / "a");
    } catch (const FileError&) {
    }
  };
  for (const auto& [name, unused] : test::python_files().at("files").items()) {
    const std::string good = python_file(name);
    const std::size_t step = std::max<std::size_t>(1, good.size() / 150);
    for (std::size_t i = 0; i < good.size(); i += step) {
      try_read(good.substr(0, i));
      std::string changed = good;
      changed[i] = static_cast<char>(changed[i] ^ 0x55);
      try_read(changed);
    }
  }
}

}  // namespace
}  // namespace semitone::weights
