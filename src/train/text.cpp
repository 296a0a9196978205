#include "src/train/text.h"

#include "semitone/core/error.h"

#include <torch/types.h>

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace semitone::train {
namespace {

constexpr auto kTextData = "train.text";

class TextExamples final : public Examples {
 public:
  // @param tokens  uint8, at least length + 1
  TextExamples(at::Tensor tokens, std::int64_t length)
      : tokens_(std::move(tokens)), length_(length), rows_(tokens_.unfold(0, length + 1, length)) {}

  std::int64_t size() const override { return rows_.size(0); }

  std::shared_ptr<const Examples> to(c10::Device device) const override {
    return std::make_shared<TextExamples>(tokens_.to(device), length_);
  }

  Batch batch(const at::Tensor& indices) const override {
    const at::Tensor rows = rows_.index_select(0, indices).to(torch::kLong);
    return {rows.narrow(1, 0, length_).contiguous(), rows.narrow(1, 1, length_).flatten()};
  }

 private:
  at::Tensor tokens_;
  std::int64_t length_;
  at::Tensor rows_;  // (sequences, length + 1), a view: the last token of a row begins the next one
};

void check(const zoo::Text& text, const TextOptions& options, std::int64_t train) {
  const std::int64_t least = options.sequence_length() + 1;
  const std::int64_t test = text.size() - train;
  if (train >= least && test >= least) return;
  throw Error(kTextData,
              fmt::format("a text with at least {} characters to train on and {} for the test, for "
                          "sequences of {}",
                          least, least, options.sequence_length()),
              fmt::format("{} and {}", train, test),
              "use a longer text, a lower --sequence-length or another --test-share");
}

}  // namespace

DataSet text_data(const zoo::Text& text, const TextOptions& options) {
  if (options.sequence_length() < 1) {
    throw Error(kTextData, "a sequence length of at least 1",
                std::to_string(options.sequence_length()));
  }
  if (!(options.test_share() > 0 && options.test_share() < 1)) {
    throw Error(kTextData, "a test share above 0 and below 1",
                fmt::format("{}", options.test_share()));
  }
  const std::int64_t test = std::llround(static_cast<double>(text.size()) * options.test_share());
  const std::int64_t train = text.size() - test;
  check(text, options, train);
  const auto part = [&](std::int64_t begin, std::int64_t size) {
    return std::make_shared<TextExamples>(text.tokens.narrow(0, begin, size),
                                          options.sequence_length());
  };
  return {part(0, train),
          part(train, test),
          kText,
          {{"--sequence-length", std::to_string(options.sequence_length())},
           {"--test-share", fmt::format("{}", options.test_share())}},
          [text] { return checksum_of({text.tokens}, text.vocabulary); }};
}

}  // namespace semitone::train
