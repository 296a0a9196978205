#pragma once

#include "semitone/zoo/text.h"
#include "src/train/data_set.h"

#include <torch/arg.h>

#include <cstdint>

// A text as the data of a training: a model learns to predict each of its characters.
namespace semitone::train {

struct TextOptions {
  // Characters of an example. Each is predicted from those before it in the example.
  TORCH_ARG(std::int64_t, sequence_length) = 128;
  // Share of the text that is held out for the test: its last characters.
  TORCH_ARG(double, test_share) = 0.1;
};

// Divides both parts of the text into sequences, one after the other. A batch has tokens, int64
// (B, sequence_length), and as labels, int64 (B * sequence_length), the token after each one. In an
// epoch, each character but the first is predicted once. Characters at the end of a part that do
// not fill a sequence are not used.
//
// Error for a sequence_length below 1, a test_share that is not above 0 and below 1, and for a text
// of which a part has no whole sequence.
DataSet text_data(const zoo::Text& text, const TextOptions& options = {});

}  // namespace semitone::train
