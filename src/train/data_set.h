#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <array>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <string_view>

// The data of a training, independent of their kind. Each kind has its own header (images.h, text.h),
// which makes a DataSet. Nothing else in this room depends on the kind.
namespace semitone::train {

// A kind of data, and the words for the results of a training on it.
struct DataKind {
  std::string_view name;      // in JSON
  std::string_view examples;  // what a batch consists of: "images"
  std::string_view items;     // what speeds count, one for each label: "images"
  bool has_memory_format;     // whether the inputs have the memory format of images
  bool can_augment;  // whether inputs can be changed at random without changing their label
  // Whether the test's result is the perplexity, exp(loss), rather than the accuracy.
  bool has_perplexity;

  friend bool operator==(const DataKind&, const DataKind&) = default;
};

inline constexpr DataKind kImages{.name = "images",
                                  .examples = "images",
                                  .items = "images",
                                  .has_memory_format = true,
                                  .can_augment = true,
                                  .has_perplexity = false};
inline constexpr DataKind kText{.name = "text",
                                .examples = "sequences",
                                .items = "characters",
                                .has_memory_format = false,
                                .can_augment = false,
                                .has_perplexity = true};
inline constexpr std::array kDataKinds{kImages, kText};

// The inputs of a model, and a label for each row of its logits.
struct Batch {
  at::Tensor inputs;
  at::Tensor labels;  // int64, (rows)
};

// Examples to learn from, or to be tested on.
class Examples {
 public:
  Examples() = default;
  Examples(const Examples&) = delete;
  Examples& operator=(const Examples&) = delete;
  virtual ~Examples() = default;

  virtual std::int64_t size() const = 0;
  // The same examples in the memory of a device.
  virtual std::shared_ptr<const Examples> to(c10::Device device) const = 0;
  // @param indices  int64, on the device of the examples; each from 0 to size() - 1
  virtual Batch batch(const at::Tensor& indices) const = 0;
  // The same with inputs that are changed at random: how depends on indices, seed and epoch only.
  // batch() if the kind cannot be augmented.
  virtual Batch augmented(const at::Tensor& indices, std::uint64_t /*seed*/,
                          std::int64_t /*epoch*/) const {
    return batch(indices);
  }
};

// The examples of a training and of its test.
struct DataSet {
  std::shared_ptr<const Examples> train;
  std::shared_ptr<const Examples> test;
  DataKind kind = kImages;
  // What must match on resume, besides the number of examples: flags and their values.
  std::map<std::string, std::string> settings{};
  // Tells data sets of the same size apart. Reads all of the data, about a gigabyte a second.
  std::function<std::string()> checksum{};
};

// The checksum of CPU tensors, and of a text.
std::string checksum_of(std::initializer_list<at::Tensor> tensors, std::string_view text = {});

// Returns the data set with one test example, for trainings whose test result is not needed: a test
// takes as long as hundreds of steps.
DataSet with_one_test_example(const DataSet& data);

}  // namespace semitone::train
